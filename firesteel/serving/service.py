"""Service: a model behind an engine's thread, and Call: one HTTP request's answers. All of it belongs to asyncio's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask
from firesteel.recipe import Serve
from firesteel.serving.answer import Answer, Delta
from firesteel.serving.loop import EngineThread
from firesteel.serving.metrics import Metrics, Stopwatch
from firesteel.serving.refusals import Refusal, draining, engine_failed, timed_out


@dataclass(frozen=True)
class Served:
    """A model as clients see it.

    Attributes:
        name: what clients ask for.
        encode: text -> token ids; like `encode_chat` it runs in a thread of its own, one call at a time, and raises a FiresteelError where it cannot.
        encode_chat: turns (`role`, `content` ...), tools and options of the template -> token ids of the prompt.
        decode: token ids -> text without special tokens.
        token_text: one token's text, special tokens shown.
        token_bytes: its bytes, which need be no text: a token may be a part of a character.
        eos_ids: tokens that end an answer.
        vocab_size: token ids are below this.
        created: seconds since 1970.
    """

    name: str
    encode: Callable[[str], list[int]]
    encode_chat: Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]], list[int]]
    decode: Callable[[list[int]], str]
    token_text: Callable[[int], str]
    token_bytes: Callable[[int], bytes]
    eos_ids: frozenset[int]
    vocab_size: int
    created: int


class Service:
    """What the routes share.

    Attributes:
        draining: nothing new is accepted.
        calls: requests under way.
    """

    def __init__(self, served: Served, engine: Engine, settings: Serve) -> None:
        self.served, self.settings = served, settings
        self.thread = EngineThread(engine, engine.max_requests + settings.max_queue)
        self.metrics = Metrics()
        # One thread: a tokenizer is not made for several at once, and a long prompt must not hold asyncio up.
        self.encoding = ThreadPoolExecutor(1, thread_name_prefix="firesteel-encode")
        self.calls: set[Call] = set()
        self.draining = False

    @property
    def engine(self) -> Engine:
        return self.thread.engine

    def check(self) -> None:
        """Refuse where nothing can be answered.

        Raises:
            Refusal: the engine has failed, or the server is shutting down.
        """
        if self.thread.failed is not None:
            raise engine_failed(self.thread.failed, status=503)
        if self.draining:
            raise draining()

    def close(self) -> None:
        """Cancel what is open, give the caches back and end the threads."""
        self.encoding.shutdown(cancel_futures=True)
        self.thread.close()

    async def drain(self) -> None:
        """Accept nothing more, wait for what runs (`serve.drain_seconds` at most), end the rest."""
        self.draining = True
        deadline = time.monotonic() + self.settings.drain_seconds
        while self.calls and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for call in list(self.calls):
            call.refuse(draining())


class Call:
    """One HTTP request: asks the engine for its answers, in the end takes back what is not finished.

    Args:
        started: `time.perf_counter()` at its arrival.
    """

    def __init__(self, service: Service, started: float) -> None:
        self._service, self._started = service, started
        self._queue: asyncio.Queue[tuple[int, Delta | Refusal]] = asyncio.Queue()
        self._tickets: list[int] = []
        seconds = service.settings.request_seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self.refuse, timed_out(seconds))
        service.calls.add(self)

    def ask(self, asks: Sequence[tuple[Ask, Answer]]) -> None:
        """Queue all of them, or none.

        Raises:
            Refusal: too many answers are waiting already.
        """
        thread = self._service.thread
        if len(asks) > thread.room:
            raise Refusal(429, f"{thread.open} answers are being written or wait already (serve.max_queue): try again later", code="queue_full", retry=1)
        for index, (ask, answer) in enumerate(asks):
            watch = Stopwatch(self._service.metrics, self._started)
            self._tickets.append(thread.submit(ask, answer, partial(self._take, index, watch)))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Index of an answer and what is new of it, until all are complete.

        Raises:
            Refusal: there will be no more, and why.
        """
        left = len(self._tickets)
        while left:
            index, found = await self._queue.get()
            if isinstance(found, Refusal):
                raise found
            if found.error is not None:
                raise engine_failed(found.error)
            if found.finish == "abort":
                raise draining()
            left -= found.last
            yield index, found

    def refuse(self, refusal: Refusal) -> None:
        """End the request with this; the engine stops at once, even where the client does not take what was written for it."""
        self._queue.put_nowait((-1, refusal))
        self._cancel()

    def close(self) -> None:
        """Nobody listens any more: what is not finished is cancelled."""
        self._timer.cancel()
        self._cancel()
        self._service.calls.discard(self)

    def _cancel(self) -> None:
        for ticket in self._tickets:
            self._service.thread.cancel(ticket)

    def _take(self, index: int, watch: Stopwatch, delta: Delta) -> None:
        watch.take(delta)
        self._queue.put_nowait((index, delta))
