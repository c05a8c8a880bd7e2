"""A screen for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from firesteel.stages.line import Bar


class QuietScreen:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(f"warning: {text}")

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Bar]:
        yield _NoBar()


class _NoBar:
    def advance(self, amount: float = 1, note: str = "") -> None:
        assert amount >= 0

    def set(self, done: float, note: str = "") -> None:
        assert done >= 0
