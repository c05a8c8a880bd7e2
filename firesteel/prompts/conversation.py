"""Prompt and Conversation: what the target is asked, and what came of it.

A prompt is a list of turns. Where a user (or tool) turn is followed by no assistant turn, an answer is due:
`[user, user]` is a conversation of two turns, to be answered one by one. Assistant turns that stand in a prompt
are history: the target sees them, nobody learns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from firesteel.artifact import hash_json

Message = dict[str, Any]
Tool = dict[str, Any]
FinishReason = Literal["stop", "length", "given"]


def answer_slots(messages: Sequence[Message]) -> list[int]:
    """Indices into `messages` before which an answer is due (`len(messages)` for one at the end), ascending.

    An answer is due after each user turn and after the last of a row of tool turns, unless one stands there.
    """
    slots = []
    for i, message in enumerate(messages):
        following = messages[i + 1]["role"] if i + 1 < len(messages) else None
        parallel_results = message["role"] == "tool" and following == "tool"
        if message["role"] in ("user", "tool") and following != "assistant" and not parallel_results:
            slots.append(i + 1)
    return slots


@dataclass(frozen=True)
class Prompt:
    """What the target is asked.

    Attributes:
        id: name of the row, for people; unique only within its source.
        domain: kind of prompt that figures are reported under.
        messages: turns with `role` system, user, assistant or tool, and `content`; assistant turns may carry
            `reasoning_content` and `tool_calls`.
        tools: JSON schemas of the tools on offer, or None.
        source: where it came from, e.g. `chats.jsonl:17`; names it in errors.
    """

    id: str
    domain: str
    messages: list[Message]
    tools: list[Tool] | None = None
    source: str = ""

    @cached_property
    def key(self) -> str:
        """Hash of messages and tools; equal for equal prompts whatever their id or source."""
        return hash_json([self.messages, self.tools])

    @property
    def where(self) -> str:
        """How errors name this prompt."""
        return self.source or self.id

    @cached_property
    def slots(self) -> list[int]:
        """Where answers are due, see `answer_slots`."""
        return answer_slots(self.messages)

    def history(self, answers: Sequence[Message]) -> list[Message]:
        """What the target sees before answer number `len(answers)`: the turns so far, earlier answers in their places.

        Args:
            answers: assistant turns given so far, fewer than there are slots.
        """
        assert len(answers) < len(self.slots), f"prompt {self.where} has {len(self.slots)} answers due, {len(answers)} are given"
        return [message for message, _ in self._woven(answers, self.slots[len(answers)])]

    def filled(self, answers: Sequence[Message], finish_reasons: Sequence[FinishReason]) -> Conversation:
        """The conversation with the given answers; ends after the last of them."""
        assert 0 < len(answers) <= len(self.slots), f"prompt {self.where} has {len(self.slots)} answers due, {len(answers)} are given"
        assert len(answers) == len(finish_reasons), "one finish reason per answer"
        woven = [*self._woven(answers[:-1], self.slots[len(answers) - 1]), (answers[-1], len(answers) - 1)]
        reasons: list[FinishReason] = ["given" if n is None else finish_reasons[n] for m, n in woven if m["role"] == "assistant"]
        return Conversation(self.id, self.domain, [m for m, _ in woven], tuple(reasons), self.tools, self.source)

    def to_row(self) -> dict[str, Any]:
        """The prompt as a JSON-able row; `prompt_from_row` reads it."""
        return {"id": self.id, "domain": self.domain, "messages": self.messages, "tools": self.tools, "source": self.source}

    def _woven(self, answers: Sequence[Message], end: int) -> list[tuple[Message, int | None]]:
        """Turns before index `end` with answers in their slots; beside each its number as an answer, None for turns of the prompt."""
        numbers = {slot: n for n, slot in enumerate(self.slots[: len(answers)])}
        woven: list[tuple[Message, int | None]] = []
        for i, message in enumerate(self.messages[:end]):
            if i in numbers:
                woven.append((answers[numbers[i]], numbers[i]))
            woven.append((message, None))
        return woven


def prompt_from_row(row: dict[str, Any]) -> Prompt:
    """Read what `Prompt.to_row` wrote."""
    return Prompt(row["id"], row["domain"], row["messages"], row["tools"], row["source"])


@dataclass(frozen=True)
class Conversation:
    """A prompt whose assistant turns are filled in.

    Attributes:
        messages: as in `Prompt`, with assistant turns (`content`, `reasoning_content`, `tool_calls`).
        finish_reasons: one per assistant turn: `stop` (the turn is complete), `length` (it was cut: no end is
            learned), `given` (part of the prompt: nothing of it is learned).
    """

    id: str
    domain: str
    messages: list[Message]
    finish_reasons: tuple[FinishReason, ...]
    tools: list[Tool] | None = None
    source: str = ""

    @cached_property
    def key(self) -> str:
        """Hash of messages and tools."""
        return hash_json([self.messages, self.tools])

    @property
    def where(self) -> str:
        """How errors name this conversation."""
        return self.source or self.id
