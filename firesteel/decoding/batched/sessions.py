"""Targets and drafters that work on one sequence at a time, behind the batched engine's interface.

For target families and algorithms without an engine over blocks: every request keeps a session (its own cache), and a step runs them one after
another. What is written is the same; a batch gains nothing but that requests take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from firesteel.decoding.protocol import Drafter, Target
from firesteel.drafters.rows import Draft, Want
from firesteel.kernels.spans import Span


class SessionTarget:
    """Sessions of a target, made as requests come and used again when they have left.

    Args:
        make: a new session; all share the model's weights.
    """

    shares_prefix = False

    def __init__(self, make: Callable[[], Target]) -> None:
        self._make = make
        first = make()
        self._idle, self._busy = [first], dict[int, Target]()
        self.max_length = first.max_length

    def forward(self, tokens: Tensor, spans: Sequence[Span], keep: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits, aux, begin = [], [], 0
        for span, rows in zip(spans, keep, strict=True):
            if span.key not in self._busy:
                self._busy[span.key] = self._idle.pop() if self._idle else self._make()
                self._busy[span.key].rewind(0)
            session = self._busy[span.key]
            session.rewind(span.start)
            step = session.forward(tokens[begin : begin + span.count], keep=max(1, rows))
            begin += span.count
            logits.append(step.logits[-rows:] if rows else step.logits[:0])
            aux.append(step.aux)
        return torch.cat(logits), torch.cat(aux)

    def forget(self, key: int) -> None:
        session = self._busy.pop(key, None)
        if session is not None:
            self._idle.append(session)


class SessionDrafter:
    """Sessions of a drafter whose distributions are over target ids, one for each request."""

    shares_prefix = False
    scratch = 0

    def __init__(self, make: Callable[[], Drafter], num_drafts: int) -> None:
        self._make, self.num_drafts = make, num_drafts
        self._idle, self._busy = list[Drafter](), dict[int, Drafter]()

    def observe(self, tokens: Tensor, spans: Sequence[Span], aux: Tensor) -> None:
        begin = 0
        for span in spans:
            session = self._of(span.key)
            session.observe(tokens[begin : begin + span.count], aux[begin : begin + span.count])
            begin += span.count

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        found = []
        for want in wants:
            made = self._of(want.span.key).draft(want.anchor, want.count, temperature=want.temperature, generator=want.generator)
            said = made.confidences
            confidences = None if said is None else torch.as_tensor(said).tolist()
            found.append(Draft(torch.as_tensor(made.tokens).tolist(), made.probs, confidences))
        return found

    def forget(self, key: int) -> None:
        session = self._busy.pop(key, None)
        if session is not None:
            session.rewind(0)
            self._idle.append(session)

    def _of(self, key: int) -> Drafter:
        if key not in self._busy:
            self._busy[key] = self._idle.pop() if self._idle else self._make()
            self._busy[key].rewind(0)
        return self._busy[key]
