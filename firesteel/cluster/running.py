"""Processes of a cluster from start to end: servers first, trainers when they are ready, all stopped when the trainers are done."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from firesteel.cluster.hands import Hands
from firesteel.cluster.process import Process
from firesteel.errors import ResourceError, TargetError

_FRIENDLY, _SAVING = 20.0, 60.0  # seconds that a server, and a trainer that saves its state, get to end
_PAUSE = 0.1


class Running:
    """The processes of a run, with a log each. A context manager: leaving it stops them.

    Args:
        folder: of the logs.
        timeout: seconds until all servers must answer.
        say: tells the user.
    """

    def __init__(self, processes: Sequence[Process], hands: Hands, folder: Path, timeout: float, say: Callable[[str], None]) -> None:
        self.processes, self.hands, self.folder, self.timeout, self.say = list(processes), hands, folder, timeout, say
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._gone: set[str] = set()

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

    def _start(self, process: Process) -> None:
        command = self.hands.command(process)
        held = command[0] == "ssh"
        try:
            with self.log(process).open("wb") as log:
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
        """Until all trainers have ended, or one with an error; a server that ends meanwhile is said, and is missed only if none is left."""
        servers = [p for p in self.processes if p.role == "server"]
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
                if process.role != "trainer" and process.name not in self._gone and self._running[process.name].poll() is not None:
                    self._gone.add(process.name)
                    self.say(f"launch: {process.name} has ended: {last_line(self.log(process))}")
            if servers and all(p.name in self._gone for p in servers):
                raise TargetError("no server is left", mend=f"the logs are in {self.folder}; the same command resumes")
            time.sleep(_PAUSE)


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
