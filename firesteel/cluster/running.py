"""Processes of a cluster from start to end: servers first, trainers when they are ready, all stopped when the trainers are done."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from firesteel.cluster.hands import Hands
from firesteel.cluster.process import Process
from firesteel.errors import ResourceError, TargetError

_FRIENDLY, _SAVING = 20.0, 60.0  # seconds that a server, and a trainer that saves its state, get to end
_PAUSE = 0.1
_FIRST, _LONGEST = 1.0, 60.0  # seconds until a server that ended is started again: the first time, and at most


class Running:
    """The processes of a run, with a log each. A context manager: leaving it stops them.

    Args:
        folder: of the logs.
        timeout: seconds until all servers must answer.
        say: tells the user.
        restarts: times that a server or the master that has ended, once all were ready, is started again.
    """

    def __init__(self, processes: Sequence[Process], hands: Hands, folder: Path, timeout: float, say: Callable[[str], None], restarts: int = 0) -> None:
        self.processes, self.hands, self.folder, self.timeout, self.say, self.restarts = list(processes), hands, folder, timeout, say, restarts
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._gone: set[str] = set()  # units that are not started again
        self._again: dict[str, float] = {}  # unit -> when it is started again
        self._tries: Counter[str] = Counter()

    def __enter__(self) -> Running:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self) -> int:
        """Start everything, wait for the trainers, and return the first exit code of theirs that is not 0.

        Raises:
            ResourceError: a program cannot be started.
            TargetError: the master or a server ends or hangs before all are ready, or no server is left.
        """
        first = [p for p in self.processes if p.role != "trainer"]
        for process in first:
            self._start(process)
        self._wait_until_ready(first)
        trainers = [p for p in self.processes if p.role == "trainer"]
        for process in trainers:
            self._start(process)
        return self._watch(trainers)

    def log(self, process: Process) -> Path:
        return self.folder / f"{process.name}.log"

    def stop(self) -> None:
        """End what still runs: trainers by an interrupt, so that they save their state, then the rest."""
        for role, how, seconds in (("trainer", signal.SIGINT, _SAVING), ("server", signal.SIGTERM, _FRIENDLY), ("master", signal.SIGTERM, _FRIENDLY)):
            mine = [self._running[p.name] for p in self.processes if p.role == role and p.name in self._running]
            for process in mine:
                # A remote command is held by its standard input; ssh itself must live to carry its last words.
                if process.stdin is not None:
                    with contextlib.suppress(OSError):
                        process.stdin.close()
                else:
                    _signal(process, how)
            deadline = time.monotonic() + seconds
            for process in mine:
                while _alive(process) and time.monotonic() < deadline:
                    time.sleep(0.02)
                _signal(process, signal.SIGKILL)
                process.wait()
        self._running = {}

    def _start(self, process: Process, mode: str = "wb") -> None:
        command = self.hands.command(process)
        held = command[0] == "ssh"
        try:
            with self.log(process).open(mode) as log:
                self._running[process.name] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if held else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.hands.env(process)},
                    start_new_session=True,
                )
        except OSError as e:
            raise ResourceError(f"{process.name} cannot be started: {command[0]}: {e.strerror}", mend="install it, or correct the recipe's paths") from e

    def _wait_until_ready(self, started: list[Process]) -> None:
        waiting = [p for p in started if p.health is not None]
        deadline = time.monotonic() + self.timeout
        while waiting:
            for process in started:
                code = self._running[process.name].poll()
                if code is not None:
                    raise TargetError(f"{process.name} ended with code {code}: {last_line(self.log(process))}", mend=f"the whole log is {self.log(process)}")
            ready = [p for p in waiting if p.health is not None and healthy(p.health)]
            for process in ready:
                waiting.remove(process)
                self.say(f"launch: {process.name} is ready at {process.health}")
            if waiting and time.monotonic() > deadline:
                names = ", ".join(p.name for p in waiting)
                raise TargetError(
                    f"no sign of life within {self.timeout:g} s: {names}", mend=f"look at the logs in {self.folder}, or raise target.vllm.start_timeout"
                )
            if waiting:
                time.sleep(_PAUSE)

    def _watch(self, trainers: list[Process]) -> int:
        """Until all trainers have ended, or one with an error. A server that ends meanwhile is started again as often as is allowed, and then missed
        only if none is left."""
        servers = {_unit(p) for p in self.processes if p.role == "server"}
        while True:
            codes = {p.name: self._running[p.name].poll() for p in trainers}
            bad = next(((name, code) for name, code in codes.items() if code not in (None, 0)), None)
            if bad is not None and bad[1] is not None:
                code = bad[1] if bad[1] > 0 else 128 - bad[1]
                self.say(f"launch: {bad[0]} ended with code {code}: {last_line(self.folder / f'{bad[0]}.log')}")
                return code
            if all(code == 0 for code in codes.values()):
                return 0
            for process in self.processes:
                unit = _unit(process)
                if process.role != "trainer" and unit not in self._gone | self._again.keys() and self._running[process.name].poll() is not None:
                    self._ended(process)
            self._start_again()
            if servers and servers <= self._gone:
                raise TargetError("no server is left", mend=f"the logs are in {self.folder}; the same command resumes")
            time.sleep(_PAUSE)

    def _ended(self, process: Process) -> None:
        """A server or the master has ended: the rest of it goes, too, and it is started again later, if it may."""
        unit, what = _unit(process), f"launch: {process.name} has ended: {last_line(self.log(process))}"
        for part in self._parts(unit):
            _signal(self._running[part.name], signal.SIGKILL)
        if self._tries[unit] >= self.restarts:
            self._gone.add(unit)
            self.say(what)
            return
        pause = min(_LONGEST, _FIRST * 2.0 ** self._tries[unit])
        self._tries[unit] += 1
        self._again[unit] = time.monotonic() + pause
        self.say(f"{what}; it is started again in {pause:g} s ({self._tries[unit]} of {self.restarts} times)")

    def _start_again(self) -> None:
        for unit in [u for u, when in self._again.items() if time.monotonic() >= when]:
            del self._again[unit]
            for part in self._parts(unit):
                self._running[part.name].wait()
                self._start(part, "ab")

    def _parts(self, unit: str) -> list[Process]:
        return [p for p in self.processes if _unit(p) == unit]


def _unit(process: Process) -> str:
    """What lives and dies together: a process, or the parts of a server over several nodes."""
    return re.sub(r"-part\d+$", "", process.name)


def healthy(url: str) -> bool:
    """Whether a URL answers 200 now. No proxy stands between the machines of a cluster."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=2)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def last_line(log: Path) -> str:
    """What a log ends with: its last error, or its last line."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return ([line for line in lines if "rror" in line] or lines or ["it said nothing"])[-1][-300:]


def _alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether anything of its group still runs (a server's workers are its children)."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, how)
