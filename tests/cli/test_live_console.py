"""The console at a terminal: live bars that say what goes on and then go away, lines and warnings as they were written."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from firesteel.cli.screen import ConsoleScreen

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def terminal() -> tuple[ConsoleScreen, io.StringIO]:
    """A screen on a terminal 120 columns wide that only remembers what it is sent."""
    screen, sent = ConsoleScreen(), io.StringIO()
    screen.console = Console(file=sent, force_terminal=True, width=120, highlight=False, color_system="standard", legacy_windows=False)
    return screen, sent


def frames(sent: io.StringIO) -> list[str]:
    """What was shown, line by line, without colours and cursor movements."""
    return [text.strip() for text in re.split(r"[\r\n]", COLOURS.sub("", sent.getvalue())) if text.strip()]


def test_a_bar_shows_share_times_and_note_while_work_goes_on(terminal: tuple[ConsoleScreen, io.StringIO]) -> None:
    screen, sent = terminal
    with screen.bar("training dspark", 200.0) as bar:
        bar.set(50.0, "step 50 loss 1.250 best 1.31")
        bar.advance(10.0)  # the note stays
        bar.advance(90.0, "step 150 loss 1.125 best 1.44")
    shown = frames(sent)
    last = [text for text in shown if text.startswith("training dspark")][-1]
    assert re.search(r"training dspark .* 75% \d:\d\d:\d\d left (\d:\d\d:\d\d|-:--:--) step 150 loss 1\.125 best 1\.44", last), shown


def test_a_bar_goes_away_and_lines_said_meanwhile_stay(terminal: tuple[ConsoleScreen, io.StringIO]) -> None:
    screen, sent = terminal
    with screen.bar("answers", 4) as bar:
        bar.advance(1, "1 answers")
        screen.say("dspark: step 10: validation acceptance length 1.310 (best 1.310)")
        bar.advance(3)
    text = sent.getvalue()
    assert "dspark: step 10: validation acceptance length 1.310 (best 1.310)" in frames(sent)
    assert text.rstrip("\n").endswith("\x1b[2K") or "\x1b[2K" in text.rsplit("answers", 1)[1]  # the line of the bar is erased
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


def test_a_bar_of_nothing_is_no_error(terminal: tuple[ConsoleScreen, io.StringIO]) -> None:
    with terminal[0].bar("nothing", 0) as bar:
        bar.set(0.0)


@pytest.mark.parametrize("text", ["layers [1, 2, 4]", "[bold] is not for us", "see /models/[x]/y and [/x]", "100% [link=a]"])
def test_brackets_are_text(terminal: tuple[ConsoleScreen, io.StringIO], text: str) -> None:
    screen, sent = terminal
    screen.say(text)
    screen.warn(text)
    with screen.bar(text, 2) as bar:
        bar.advance(1, text)
    shown = frames(sent)
    assert shown[:2] == [text, f"warning: {text}"]
    assert any(found.startswith(text) and found.endswith(text) and "50%" in found for found in shown[2:])
    assert "\x1b[33mwarning:" in sent.getvalue()


def test_long_lines_are_not_cut(terminal: tuple[ConsoleScreen, io.StringIO]) -> None:
    screen, sent = terminal
    screen.say("a" * 300)
    assert frames(sent) == ["a" * 300]
