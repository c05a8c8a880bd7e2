"""Where an answer ends, as users of the OpenAI API expect it: stop strings in its text, whatever tokens or blocks it comes in.

A stop string may begin in one token and end in another, or lie in the middle of an accepted block. The text is therefore read
token by token, and the answer ends with the token that completes a stop string; tokens behind it never join the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firesteel.errors import RecipeError

# What a tokenizer shows for a character whose last bytes are still to come.
_INCOMPLETE = "\ufffd"
# Tokens behind the last whole character in which its successor must have come: a character has 4 bytes, a token at least one.
_LONGEST = 8


@dataclass(frozen=True)
class Stop:
    """A stop string `[begin, end)` in a text."""

    begin: int
    end: int
    stop: str


def find_stop(text: str, stops: Sequence[str], *, searched: int = 0) -> Stop | None:
    """The stop string that a reader going from left to right completes first (of several that end there, the longest).

    The result does not depend on how the text was cut into pieces: more text never changes what was found before.

    Args:
        searched: characters at the beginning of which it is known that no stop string ends within them.

    Raises:
        RecipeError: an empty stop string, which every text contains.
    """
    if "" in stops:
        raise RecipeError("a stop string is empty: it would end every answer before it begins", mend="leave it out")
    found = []
    for stop in stops:
        begin = text.find(stop, max(0, searched - len(stop) + 1))
        if begin >= 0:
            found.append(Stop(begin, begin + len(stop), stop))
    return min(found, key=lambda f: (f.end, f.begin), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of a stop string, and must not be streamed yet."""
    longest = max((len(s) - 1 for s in stops), default=0)
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) and len(s) > n for s in stops)), 0)


class AnswerText:
    """The text of one answer, as its tokens come.

    `add` fits `decode_plain` and `decode_speculative` as their argument `stop`.

    Args:
        decode: token ids -> text, without special tokens; called on a few tokens at a time.
        stops: stop strings; the text ends before the first of them.
        include_stop: the stop string itself belongs to the text.

    Attributes:
        text: all of it that is known: whole characters, and no further than the stop string.
        stop: the stop string that ended it, or None.

    Raises:
        RecipeError: an empty stop string.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        find_stop("", stops)
        self.text = ""
        self.stop: str | None = None
        self._decode, self._stops, self._include = decode, tuple(stops), include_stop
        # A window of tokens is decoded: the last ones that ended with a whole character, for context (some tokenizers swallow the
        # first space of a text), and all newer ones. `_shown` characters of the window are in the text already.
        self._window: list[int] = []
        self._context = self._shown = 0

    def add(self, token: int) -> bool:
        """Take the next token; True where it completes a stop string."""
        if self.stop is not None:
            return True
        self._window.append(token)
        decoded = self._decode(self._window)
        # Bytes that so many tokens did not complete belong to no character: they show as they are, and the window stays short.
        lost = len(self._window) - self._context > _LONGEST
        whole = decoded if lost else decoded.rstrip(_INCOMPLETE)
        self._extend(whole[self._shown :])
        self._shown = max(self._shown, len(whole))
        if whole == decoded:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._decode(self._window))
        return self.stop is not None

    def streamable(self) -> str:
        """The part of the text that no later token can take back."""
        return self.text if self.stop is not None else self.text[: len(self.text) - held_back(self.text, self._stops)]

    def finish(self) -> str:
        """The whole text, when no more tokens come; bytes that never became a character show as U+FFFD."""
        if self.stop is None:
            self._extend(self._decode(self._window)[self._shown :])
            self._window, self._context, self._shown = [], 0, 0
        return self.text

    def _extend(self, piece: str) -> None:
        known = len(self.text)
        self.text += piece
        found = find_stop(self.text, self._stops, searched=known)
        if found is not None:
            self.stop = found.stop
            self.text = self.text[: found.end if self._include else found.begin]
