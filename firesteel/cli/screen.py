"""The console: lines, and progress bars with an estimate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from firesteel.stages.line import Bar
from firesteel.stages.status import span

_SILENCE = 60.0  # seconds that a bar without a terminal is silent at most, as long as it is told anything


class _RichBar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float = 1, note: str = "") -> None:
        self._progress.update(self._task, advance=amount, **({"note": note} if note else {}))  # type: ignore[arg-type]

    def set(self, done: float, note: str = "") -> None:
        self._progress.update(self._task, completed=done, **({"note": note} if note else {}))  # type: ignore[arg-type]


class _PlainBar:
    """Without a terminal: a line whenever another tenth is done, and when progress is told a minute or more after the last line."""

    def __init__(self, console: Console, label: str, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._label, self._total, self._clock = console, label, max(total, 1e-9), clock
        self._done, self._shown = 0.0, 0
        self._begun = self._said = clock()
        self._first: float | None = None  # what the first report said is done: a run that goes on was not so fast

    def advance(self, amount: float = 1, note: str = "") -> None:
        if self._first is None:
            self._first = self._done
        self.set(self._done + amount, note)

    def set(self, done: float, note: str = "") -> None:
        self._done, now = done, self._clock()
        if self._first is None:
            self._first, self._begun = done, now
        tenth = int(10 * done / self._total)
        if tenth > self._shown or now - self._said >= _SILENCE:
            self._shown, self._said = max(tenth, self._shown), now
            share = min(100, int(100 * done / self._total))
            self._console.print(f"  {self._label}: {share}% {note}".rstrip() + self._left(now), markup=False, soft_wrap=True)

    def _left(self, now: float) -> str:
        """What remains at the pace so far."""
        made, due = self._done - (self._first or 0.0), self._total - self._done
        seconds = (now - self._begun) * due / made if made > 0 and due > 0 else 0.0
        return f", about {span(seconds)} left" if seconds >= 1 else ""


class ConsoleScreen:
    """Speaks to a terminal, or in plain lines to a file or pipe."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Bar]:
        """A progress bar over `total` units with elapsed time and an estimate of what remains."""
        if not self.console.is_terminal:
            yield _PlainBar(self.console, label, total)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield _RichBar(progress, progress.add_task(label, total=max(total, 1e-9), note=""))
