"""EngineThread: the one thread that calls an engine, and the way between it and asyncio.

What asyncio wants of the engine (submit, cancel) waits in a list that the thread takes before each step; what a step has made for all requests
goes back in one call. The thread sleeps while there is nothing to do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import torch

from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask, Piece
from firesteel.errors import FiresteelError
from firesteel.serving.answer import Answer, Delta

_log = logging.getLogger(__name__)

Sink = Callable[[Delta], None]


class EngineThread:
    """Runs an engine. All methods but `close` belong to the asyncio thread that called `start`.

    Args:
        engine: nobody else may call it from now on.
        most: answers that may be open, waiting ones included.

    Attributes:
        failed: what ended the engine, or None.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self.engine, self.most = engine, most
        self.failed: str | None = None
        self._aio: asyncio.AbstractEventLoop | None = None
        self._sinks: dict[int, Sink] = {}
        self._tickets = 0
        # Of the thread: what it is told, under the condition's lock, and what it has not handed over yet.
        self._told = threading.Condition()
        self._commands: list[tuple[int, Ask | None, Answer | None]] = []
        self._closing = False
        self._keys: dict[int, int] = {}
        self._outbox: list[tuple[int, Delta]] = []
        self._thread = threading.Thread(target=self._run, name="firesteel-engine", daemon=True)

    @property
    def open(self) -> int:
        """Answers that are not complete."""
        return len(self._sinks)

    @property
    def room(self) -> int:
        """Answers that may still be asked for."""
        return self.most - self.open

    def start(self, aio: asyncio.AbstractEventLoop) -> None:
        self._aio = aio
        self._thread.start()

    def submit(self, ask: Ask, answer: Answer, sink: Sink) -> int:
        """Ask for an answer; `sink` is called by asyncio until a last delta.

        Returns:
            a ticket to cancel it by.
        """
        self._tickets += 1
        self._sinks[self._tickets] = sink
        self._tell_thread((self._tickets, ask, answer))
        return self._tickets

    def cancel(self, ticket: int) -> None:
        """End an answer; where it was still open, its sink is told `abort`."""
        if ticket in self._sinks:
            self._tell_thread((ticket, None, None))

    def close(self) -> None:
        """Cancel everything, give the caches back and end the thread, after the step that runs."""
        with self._told:
            self._closing = True
            self._told.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _tell_thread(self, command: tuple[int, Ask | None, Answer | None]) -> None:
        with self._told:
            self._commands.append(command)
            self._told.notify()

    # On the asyncio thread, called by the engine's.

    def _deliver(self, deltas: list[tuple[int, Delta]]) -> None:
        for ticket, delta in deltas:
            sink = self._sinks.pop(ticket, None) if delta.last else self._sinks.get(ticket)
            if sink is not None:
                sink(delta)

    def _fail(self, reason: str) -> None:
        self.failed = reason
        sinks = list(self._sinks.values())
        self._sinks.clear()
        for sink in sinks:
            sink(Delta(error=reason))

    # On the engine's thread.

    def _run(self) -> None:
        busy = False
        try:
            with torch.no_grad():
                while self._follow(busy):
                    busy = self.engine.step()
                    self._flush()
        except Exception as e:
            _log.exception("the engine has failed")
            self._call(self._fail, f"{type(e).__name__}: {e}")

    def _follow(self, busy: bool) -> bool:
        """Do what asyncio wants, wait for it where the engine is idle; False at the end."""
        with self._told:
            while not (busy or self._commands or self._closing):
                self._told.wait()
            commands, self._commands = self._commands, []
            closing = self._closing
        for ticket, ask, answer in commands:
            if ask is not None and answer is not None:
                self._submit(ticket, ask, answer)
            elif ticket in self._keys:
                self.engine.cancel(self._keys[ticket])
        if closing:
            for key in list(self._keys.values()):
                self.engine.cancel(key)
        self._flush()
        return not closing

    def _submit(self, ticket: int, ask: Ask, answer: Answer) -> None:
        def tell(piece: Piece) -> None:
            delta = answer.take(piece)
            if delta.last:
                self._keys.pop(ticket, None)
            self._outbox.append((ticket, delta))

        try:
            self._keys[ticket] = self.engine.submit(ask, tell)
        except FiresteelError as e:
            self._outbox.append((ticket, Delta(error=str(e))))

    def _flush(self) -> None:
        if self._outbox:
            deltas, self._outbox = self._outbox, []
            self._call(self._deliver, deltas)

    def _call(self, function: Callable[..., None], argument: object) -> None:
        assert self._aio is not None
        try:
            self._aio.call_soon_threadsafe(function, argument)
        except RuntimeError:  # asyncio has ended already: nobody listens
            self._closing = True
