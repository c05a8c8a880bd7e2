"""What the reference engine asks of a target and of a drafter; both are met by structure, not by inheritance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class TargetStep(Protocol):
    """What a target's forward pass over n tokens gives."""

    @property
    def logits(self) -> Tensor:
        """`[keep, V]`, of the last `keep` tokens."""
        ...

    @property
    def aux(self) -> Tensor:
        """`[n, m * d]` captured layer states."""
        ...


class Target(Protocol):
    """A target that decodes one sequence; `firesteel.target.session.TargetSession` is the real one."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens that the cache can hold."""
        ...

    def forward(self, tokens: Sequence[int] | Tensor, *, keep: int | None = None) -> TargetStep:
        """Append n tokens; logits of the last `keep` (None: all)."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...


class DraftResult(Protocol):
    """What a drafter proposes for n slots."""

    @property
    def tokens(self) -> Sequence[int] | Tensor:
        """n target token ids, drawn left to right."""
        ...

    @property
    def probs(self) -> Tensor | None:
        """`[n, V]`, over target ids, exactly the distributions the tokens were drawn from; None where drafting is deterministic."""
        ...

    @property
    def confidences(self) -> Sequence[float] | Tensor | None:
        """n probabilities that token k survives given that its prefix did, c_k made from tokens before k only; None without such a head."""
        ...


class Drafter(Protocol):
    """One sequence being drafted for."""

    def observe(self, tokens: Sequence[int] | Tensor, aux: Tensor) -> None:
        """Take in the next n positions of the text: token ids `[n]` and the target's states `[n, m * d]`."""
        ...

    def draft(self, anchor: int, count: int, *, temperature: float, generator: torch.Generator | None) -> DraftResult:
        """Propose `count` tokens after `anchor`, the newest token, whose position is the first not yet observed.

        Leaves what was observed unchanged.
        """
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` observed positions."""
        ...
