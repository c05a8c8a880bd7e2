"""The console: lines, and progress bars with an estimate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from firesteel.stages.line import Bar


class _RichBar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float = 1, note: str = "") -> None:
        self._progress.update(self._task, advance=amount, **({"note": note} if note else {}))  # type: ignore[arg-type]

    def set(self, done: float, note: str = "") -> None:
        self._progress.update(self._task, completed=done, **({"note": note} if note else {}))  # type: ignore[arg-type]


class _PlainBar:
    """Without a terminal: a line whenever another tenth is done."""

    def __init__(self, console: Console, label: str, total: float) -> None:
        self._console, self._label, self._total, self._done, self._shown = console, label, max(total, 1e-9), 0.0, 0

    def advance(self, amount: float = 1, note: str = "") -> None:
        self.set(self._done + amount, note)

    def set(self, done: float, note: str = "") -> None:
        self._done = done
        tenth = int(10 * done / self._total)
        if tenth > self._shown:
            self._shown = tenth
            self._console.print(f"  {self._label}: {min(10, tenth)}0% {note}".rstrip(), markup=False)


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
