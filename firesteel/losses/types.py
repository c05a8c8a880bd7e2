"""What a loss is asked and what it answers; shared by the dense reference and the fused path.

Conventions of both: N blocks of g slots, `R = N * g`, row `n * g + k` is slot k of block n. The draft's logits are
`cap(scale * sum_i rows_i @ weight_i.T)` over a draft vocabulary of V tokens, `cap(x) = softcap * tanh(x / softcap)`.

With a reduced vocabulary and the teacher's normaliser, p_t is exact and sums to S < 1 over the draft vocabulary, while p_d
sums to 1. The missing mass 1 - S counts like this (tokens there have p_d = 0):
    TV     = 1/2 sum |p_d - p_t| + 1/2 (1 - S) = 1 - sum min(p_d, p_t)    exact over the target's whole vocabulary
    KL(d)  = sum p_d log(p_d / p_t)                                       exact over the whole vocabulary
    JSD    = 1/2 KL(p_t || m) + 1/2 KL(p_d || m) + 1/2 (1 - S) log 2      exact over the whole vocabulary, m = (p_d + p_t) / 2
    KL     = sum p_t log(p_t / p_d) + (1 - S)                             infinite over the whole vocabulary, so the generalised
                                                                          divergence over the draft vocabulary, which is >= 0
Our TV is 1/2 ||p_d - p_t||_1; DeepSeek's D is twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.errors import TrainingError

Piece = tuple[Tensor, Tensor]
"""`rows [R, k]` and `weight [V, k]`: one summand of the draft's logits."""


@dataclass(frozen=True)
class LossWeights:
    """Factors of the terms; 0 leaves a term out. `dpace` replaces static slot weights by D-PACE's (see `weights.dpace_weights`).

    kl is KL(p_t || p_d), reverse_kl is KL(p_d || p_t), confidence is the cross entropy of the confidence logits against the
    detached 1 - TV and is left out where there are no such logits.
    """

    ce: float = 0.0
    tv: float = 0.0
    kl: float = 0.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    confidence: float = 0.0
    dpace: bool = False
    dpace_smoothing: float = 0.0


@dataclass(frozen=True)
class Head:
    """How logits come from the product x of states and weight: `softcap * tanh(x * scale / softcap)`; no cap where None."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass
class Teacher:
    """The frozen target at U unique positions.

    Attributes:
        states: `[U, d]`, after the final norm.
        weight: `[V, d]`, the LM head's rows of the draft vocabulary in its order; or all rows, if `draft_rows` are given to
            the loss (which then gathers them at every call; better to gather once).
        head: scale and cap of the target's logits.
        lognorm: `[U]` log-sum-exp of the target's final logits over its whole vocabulary. With it p_t is exact; without it
            p_t is normalised within the rows of `weight` that the draft knows.
    """

    states: Tensor
    weight: Tensor
    head: Head = Head()
    lognorm: Tensor | None = None


@dataclass
class LossResult:
    """The loss and what it was made of. Per-slot values are `[N, g]`, detached, 0 (or False) where the slot is not valid.

    Attributes:
        loss: scalar, differentiable: `sum weights * terms / denominator`.
        denominator: scalar tensor.
        weights: slot weights used (static, or D-PACE's).
        valid: bool, slots that count.
        ce: cross entropy of the true token (0 where it is outside the draft vocabulary).
        tv: total variation between p_d and p_t.
        accept: 1 - tv, the probability that the slot is accepted given that it is reached.
        prob_true: p_d of the true token.
        correct: bool, the draft's first choice is the true token.
        agree: bool, the draft's first choice is the teacher's (within the draft vocabulary).
        kl, reverse_kl, jsd, confidence: the other terms, None where their factor is 0.
        candidates: `[N, g, K]` int64, the K likeliest draft tokens of each slot by falling logit, where asked for.
        candidate_teacher: `[N, g, K]` p_t of those tokens.
    """

    loss: Tensor
    denominator: Tensor
    weights: Tensor
    valid: Tensor
    ce: Tensor
    tv: Tensor
    accept: Tensor
    prob_true: Tensor
    correct: Tensor
    agree: Tensor
    kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    jsd: Tensor | None = None
    confidence: Tensor | None = None
    candidates: Tensor | None = None
    candidate_teacher: Tensor | None = None


def compute_dtype(pieces: Sequence[Piece]) -> torch.dtype:
    """Softmax and sums run in float32, or in float64 where the rows are."""
    return torch.float64 if pieces[0][0].dtype == torch.float64 else torch.float32


def teacher_weight(teacher: Teacher, vocab: int, draft_rows: Tensor | None) -> Tensor:
    """`[V, d]`: the teacher's LM head on the draft vocabulary."""
    if teacher.weight.shape[0] == vocab:
        return teacher.weight
    if draft_rows is None:
        raise TrainingError(
            f"the teacher's head has {teacher.weight.shape[0]} rows, the draft's vocabulary {vocab}",
            mend="set drafter.draft_vocab_size to the size of the vocabulary table in use, or leave it empty",
        )
    return teacher.weight[draft_rows]


def check_shapes(pieces: Sequence[Piece], teacher: Teacher, labels: Tensor, weights: Tensor, slot_target: Tensor, confidence: Tensor | None) -> None:
    """Refuse tensors that do not belong together.

    Raises:
        TrainingError: a shape disagrees, or a slot with weight has no teacher row.
    """
    n, g = labels.shape
    for name, other in (("weights", weights), ("slot_target", slot_target), ("confidence_logits", confidence)):
        if other is not None and other.shape != labels.shape:
            raise TrainingError(f"loss: {name} has shape {list(other.shape)}, labels {[n, g]}")
    for i, (rows, weight) in enumerate(pieces):
        if rows.shape[0] != n * g or rows.shape[1] != weight.shape[1] or weight.shape[0] != pieces[0][1].shape[0]:
            raise TrainingError(f"loss: piece {i} has rows {list(rows.shape)} and weight {list(weight.shape)} for {n} blocks of {g} slots")
    if teacher.lognorm is not None and teacher.lognorm.shape[0] != teacher.states.shape[0]:
        raise TrainingError(f"loss: {teacher.lognorm.shape[0]} normalisers for {teacher.states.shape[0]} teacher states")


def denominator_of(denominator: float | Tensor | None, weights: Tensor, valid: Tensor, dpace: bool, dtype: torch.dtype) -> Tensor:
    """The divisor of the loss: the given one, else the sum of static weights, else (D-PACE) the number of valid slots; 1 where nothing is valid."""
    if denominator is not None:
        return torch.as_tensor(denominator, dtype=dtype, device=weights.device)
    total = (valid if dpace else weights * valid).sum(dtype=dtype)
    return torch.where(total > 0, total, torch.ones_like(total))
