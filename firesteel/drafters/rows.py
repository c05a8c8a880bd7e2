"""What training asks of a drafter and what it gets: the protocol every algorithm meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from firesteel.batches.batch import Batch
from firesteel.drafters.config import DraftConfig
from firesteel.kernels.spans import Span


@dataclass
class Reranked:
    """What a second choice among the likeliest tokens of each slot comes to, `[N, g]` each.

    Attributes:
        loss: differentiable; added to the loss with the slots' weights.
        correct: bool, the token finally chosen is the true one.
        accept: probability that a token drawn from the final distribution is accepted.
    """

    loss: Tensor
    correct: Tensor
    accept: Tensor


# (candidates [N, g, K] draft ids by falling logit, the target's probabilities of them [N, g, K]) -> Reranked
Rerank = Callable[[Tensor, Tensor], Reranked]


@dataclass
class TrainingRows:
    """What a loss needs; logits are the sum over pieces of `rows @ weight.T`, and never made here.

    Attributes:
        pieces: pairs of rows `[R, k]` and weight `[V_d, k]`, R = N*g in the order of `Batch.slots`.
        confidence_logits: `[N, g]` or None.
        z: `[N, g, h]` final hidden states of the slots (after the last norm).
        kept: `[N, g]` bool, the slots that were computed; the others stay out of the loss. None: all.
        candidates: how many of each slot's likeliest tokens `rerank` wants to see.
        rerank: a second choice among them, for algorithms that make one.
    """

    pieces: list[tuple[Tensor, Tensor]]
    confidence_logits: Tensor | None
    z: Tensor
    kept: Tensor | None = None
    candidates: int = 0
    rerank: Rerank | None = None


class Drafter(Protocol):
    """A trainable drafter: a `torch.nn.Module` that also has these."""

    config: DraftConfig

    def training_rows(self, batch: Batch, embed: Tensor, head: Tensor) -> TrainingRows:
        """Teacher-forced forward pass over all blocks of a batch.

        Args:
            batch: T packed tokens, N blocks of g slots.
            embed: `[V, h]` the target's embedding.
            head: `[V_d, h]` rows of the target's LM head.
        """
        ...


@dataclass
class Draft:
    """Drafted tokens.

    Attributes:
        tokens: n target ids, left to right.
        probs: `[n, V_d]` distributions they were drawn from, over draft ids; None when greedy.
        confidences: n probabilities that token k survives given that its prefix did, or None without a confidence head.
    """

    tokens: list[int]
    probs: Tensor | None
    confidences: list[float] | None


@dataclass(frozen=True)
class Want:
    """A draft to be made for one of many sequences: `count` tokens after `anchor`, which stands at `span.start`, the first position not yet observed."""

    span: Span
    anchor: int
    count: int
    temperature: float
    generator: torch.Generator | None


class DraftSession(Protocol):
    """One sequence being drafted for."""

    def observe(self, tokens: Sequence[int] | Tensor, aux: Tensor) -> None:
        """Take in the next n positions of the text: token ids `[n]` and the target's captured states `[n, m * d]`."""
        ...

    def draft(self, anchor: int, count: int, *, temperature: float = 0.0, generator: torch.Generator | None = None) -> Draft:
        """Draft `count` tokens after `anchor`, which stands at the first position not yet observed. Leaves what was observed unchanged."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all positions from `length` on."""
        ...

    def fork(self) -> Self:
        """An empty session for another sequence, with the same weights."""
        ...

    def expand(self, probs: Tensor) -> Tensor:
        """`[n, V_d]` over the draft vocabulary -> `[n, V]` over the target's."""
        ...


class BatchDrafter(Protocol):
    """Many sequences being drafted for at once.

    Attributes:
        shares_prefix: what it knows of a beginning lies in the beginning's blocks, and holds for every text that begins so.
        num_drafts: drafts of a round at most.
        scratch: positions behind the text that a draft writes to.
    """

    shares_prefix: bool
    num_drafts: int
    scratch: int

    def observe(self, tokens: Tensor, spans: Sequence[Span], aux: Tensor) -> None:
        """Take in the next positions of each span: token ids `[N]` and the target's captured states `[N, m * d]`, span after span."""
        ...

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        """One draft each; `probs` are `[n, V]`, over target ids."""
        ...

    def forget(self, key: int) -> None:
        """The sequence has left."""
        ...
