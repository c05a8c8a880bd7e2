"""What clients get: OpenAI's objects for whole answers and for chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from firesteel.decoding.logprobs import TokenLogprob
from firesteel.serving.answer import Delta, Shown

TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes]


@dataclass
class Tally:
    """What came of one answer, or of a part of it that was not sent yet."""

    shown: list[Shown] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    submitted: int = 0
    steps: int = 0
    rounds: int = 0
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.shown += delta.shown
        self.tokens += delta.tokens
        self.drafted += delta.drafted
        self.submitted += delta.submitted
        self.steps += delta.steps
        self.rounds += delta.rounds
        self.finish = delta.finish or self.finish

    @property
    def text(self) -> str:
        return "".join(s.text for s in self.shown)


class Shape(Protocol):
    """One of the two APIs."""

    prefix: str
    whole: str
    chunk: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first chunk, before there is any text."""
        ...

    def choice(self, index: int, tally: Tally, offset: int, *, stream: bool) -> dict[str, Any]:
        """A choice, or what is new of it; `offset` characters came before."""
        ...


@dataclass
class CompletionShape:
    token_text: TokenText
    logprobs: bool
    records: bool
    prefix: str = "cmpl"
    whole: str = "text_completion"
    chunk: str = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def choice(self, index: int, tally: Tally, offset: int, *, stream: bool) -> dict[str, Any]:
        logprobs = self._logprobs(tally.shown, offset) if self.logprobs else None
        made = {"index": index, "text": tally.text, "logprobs": logprobs, "finish_reason": tally.finish}
        return {**made, **_records(tally)} if self.records else made

    def _logprobs(self, shown: Sequence[Shown], offset: int) -> dict[str, Any]:
        offsets = []
        for token in shown:
            offsets.append(offset)
            offset += len(token.text)
        found = [s.logprob for s in shown if s.logprob is not None]
        return {
            "tokens": [self.token_text(x.token) for x in found],
            "token_logprobs": [x.logprob for x in found],
            # OpenAI's list has the chosen token, too, where it is not among the likeliest.
            "top_logprobs": [{self.token_text(i): p for i, p in _with_own(x)} for x in found],
            "text_offset": offsets,
        }


@dataclass
class ChatShape:
    token_text: TokenText
    token_bytes: TokenBytes
    logprobs: bool
    records: bool
    prefix: str = "chatcmpl"
    whole: str = "chat.completion"
    chunk: str = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, tally: Tally, offset: int, *, stream: bool) -> dict[str, Any]:
        logprobs = {"content": [self._token(s.logprob) for s in tally.shown if s.logprob is not None], "refusal": None} if self.logprobs else None
        if stream:
            message: dict[str, Any] = {"delta": {"content": tally.text} if tally.shown else {}}
        else:
            message = {"message": {"role": "assistant", "content": tally.text, "refusal": None}}
        made = {"index": index, **message, "logprobs": logprobs, "finish_reason": tally.finish}
        return {**made, **_records(tally)} if self.records else made

    def _token(self, found: TokenLogprob) -> dict[str, Any]:
        return {**self._entry(found.token, found.logprob), "top_logprobs": [self._entry(i, p) for i, p in found.top]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        # A part of a character has no text; clients put the bytes of such tokens together.
        return {"token": self.token_text(token), "logprob": logprob, "bytes": list(self.token_bytes(token))}


def usage(prompt_tokens: int, tallies: Sequence[Tally]) -> dict[str, Any]:
    """Tokens used; drafts stand where OpenAI counts its predicted tokens."""
    tokens, drafted = sum(t.tokens for t in tallies), sum(t.drafted for t in tallies)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": drafted,
            "rejected_prediction_tokens": sum(t.submitted for t in tallies) - drafted,
        },
    }


def event(data: object) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _records(tally: Tally) -> dict[str, Any]:
    tokens = [{"text": s.text, "drafted": s.drafted, "confidence": s.confidence} for s in tally.shown]
    return {"firesteel": {"tokens": tokens, "steps": tally.steps, "rounds": tally.rounds, "submitted": tally.submitted, "accepted": tally.drafted}}


def _with_own(found: TokenLogprob) -> tuple[tuple[int, float], ...]:
    return found.top if not found.top or any(i == found.token for i, _ in found.top) else (*found.top, (found.token, found.logprob))
