"""Targets and drafters that work on one sequence at a time, behind the batched engine's interface.

For target families and algorithms without an engine over blocks: every request keeps a session (its own cache), and a step runs them one after
another. What is written is the same; a batch gains nothing but that requests take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from firesteel.decoding.protocol import Drafter, Target
from firesteel.drafters.rows import Draft, Want
from firesteel.kernels.spans import Span

S = TypeVar("S", Target, Drafter)


class _Sessions(Generic[S]):
    """Sessions by sequence, made as sequences come and used again when they have left."""

    def __init__(self, make: Callable[[], S], idle: list[S]) -> None:
        self._make: Callable[[], S] = make
        self._idle: list[S] = idle
        self._busy: dict[int, S] = {}

    def of(self, key: int) -> S:
        """The sequence's own; an empty one where it has none yet."""
        if key not in self._busy:
            self._busy[key] = self._idle.pop() if self._idle else self._make()
            self._busy[key].rewind(0)
        return self._busy[key]

    def forget(self, key: int) -> None:
        """The sequence has left."""
        session = self._busy.pop(key, None)
        if session is not None:
            self._idle.append(session)


class SessionTarget:
    """A target by sessions.

    Args:
        make: a new session; all share the model's weights.
    """

    shares_prefix = False

    def __init__(self, make: Callable[[], Target]) -> None:
        first = make()
        self._sessions, self.max_length = _Sessions(make, [first]), first.max_length

    def forward(self, tokens: Tensor, spans: Sequence[Span], keep: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits, aux, begin = [], [], 0
        for span, rows in zip(spans, keep, strict=True):
            session = self._sessions.of(span.key)
            session.rewind(span.start)
            step = session.forward(tokens[begin : begin + span.count], keep=max(1, rows))
            begin += span.count
            logits.append(step.logits[-rows:] if rows else step.logits[:0])
            aux.append(step.aux)
        return torch.cat(logits), torch.cat(aux)

    def forget(self, key: int) -> None:
        self._sessions.forget(key)


class SessionDrafter:
    """A drafter by sessions, whose distributions are over target ids."""

    shares_prefix = False
    scratch = 0

    def __init__(self, make: Callable[[], Drafter], num_drafts: int) -> None:
        self._sessions, self.num_drafts = _Sessions(make, []), num_drafts

    def observe(self, tokens: Tensor, spans: Sequence[Span], aux: Tensor) -> None:
        begin = 0
        for span in spans:
            rows = slice(begin, begin + span.count)
            self._sessions.of(span.key).observe(tokens[rows], aux[rows])
            begin += span.count

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        found = []
        for want in wants:
            made = self._sessions.of(want.span.key).draft(want.anchor, want.count, temperature=want.temperature, generator=want.generator)
            said = made.confidences
            confidences = None if said is None else torch.as_tensor(said).tolist()
            found.append(Draft(torch.as_tensor(made.tokens).tolist(), made.probs, confidences))
        return found

    def forget(self, key: int) -> None:
        self._sessions.forget(key)
