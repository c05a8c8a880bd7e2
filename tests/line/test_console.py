"""The console without a terminal: lines that say how far work is, and that it goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from firesteel.cli.screen import ConsoleScreen, _PlainBar


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines(out: io.StringIO) -> list[str]:
    found = out.getvalue().splitlines()
    out.seek(0)
    out.truncate()
    return found


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def bar(out: io.StringIO, total: float, clock: Clock) -> _PlainBar:
    return _PlainBar(Console(file=out, width=40), "answering", total, clock)


def test_a_line_for_every_tenth_and_none_between(out: io.StringIO) -> None:
    clock = Clock()
    shown = bar(out, 40, clock)
    for _ in range(40):
        clock.now += 0.5
        shown.advance(1, "note")
    assert [text.split("%")[0] for text in lines(out)] == [f"  answering: {n}0" for n in range(1, 11)]


def test_a_minute_without_a_line_is_one_too_long(out: io.StringIO) -> None:
    clock = Clock()
    shown = bar(out, 1000, clock)
    for seconds, done in ((59, 1), (1, 2), (59, 3), (1, 4)):
        clock.now += seconds
        shown.set(done, f"{done} answers")
    # The first report is where the pace is measured from.
    assert lines(out) == ["  answering: 0% 2 answers, about 17 min left", "  answering: 0% 4 answers, about 5.6 h left"]
    clock.now += 30
    shown.set(100)
    assert len(lines(out)) == 1, "a tenth speaks for itself"
    clock.now += 59
    shown.set(101)
    assert lines(out) == []
    clock.now += 1
    shown.set(102)
    assert lines(out)[0].startswith("  answering: 10%, about ")


def test_the_estimate_is_what_the_pace_says(out: io.StringIO) -> None:
    clock = Clock()
    shown = bar(out, 100, clock)
    for _ in range(25):
        clock.now += 3
        shown.advance()
    assert lines(out) == ["  answering: 10%, about 4 min left", "  answering: 20%, about 4 min left"]
    clock.now += 60
    shown.advance()
    assert lines(out) == ["  answering: 26%, about 6 min left"]


def test_work_that_is_resumed_is_not_taken_for_fast(out: io.StringIO) -> None:
    clock = Clock()
    shown = bar(out, 1.0, clock)
    clock.now += 10
    shown.set(0.5)
    assert lines(out) == ["  answering: 50%"]
    clock.now += 60
    shown.set(0.55)
    assert lines(out) == ["  answering: 55%, about 9 min left"]


def test_a_warning_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleScreen().warn("layers [1, 2] and [/nothing] of [bold]x")
    assert capsys.readouterr().out == "warning: layers [1, 2] and [/nothing] of [bold]x\n"
