"""Validation: the acceptance length that decoding would reach on held-out, target-written text.

Loss is a poor judge of a drafter: what counts is how many tokens a round yields. With every anchor of a document evaluated,
greedy decoding can be replayed exactly: start at the first answer token, accept while draft and text agree, jump behind the
accepted tokens, repeat. The text is what the target itself wrote (greedily), so this is the acceptance length that the
reference decoder reaches at temperature 0, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from firesteel.batches.batch import Batch
from firesteel.losses.types import LossResult


@dataclass
class Validation:
    """What one validation found.

    Attributes:
        acceptance_length: replayed greedy decoding, pooled: 1 + accepted / rounds.
        expected_length: mean over anchors of 1 + sum_k prod_{i<=k} (1 - TV_i): the acceptance length at temperature 1.
        loss: mean loss.
        conditional: per position, share of true tokens drafted given that the prefix was.
        accepted, rounds: of the replay.
        confidence_logits, survived, valid: `[rows, g]` of every block, where asked for (calibration).
    """

    acceptance_length: float
    expected_length: float
    loss: float
    conditional: list[float]
    accepted: int
    rounds: int
    confidence_logits: Tensor | None = None
    survived: Tensor | None = None
    valid: Tensor | None = None


@dataclass
class _Sums:
    loss: float = 0.0
    batches: int = 0
    expected: float = 0.0
    anchors: int = 0
    accepted: int = 0
    rounds: int = 0
    hits: list[Tensor] = field(default_factory=list)
    tries: list[Tensor] = field(default_factory=list)
    blocks: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


def validate(
    results: Iterable[tuple[Batch, LossResult, Tensor | None]], *, sample_from_anchor: bool, eos_ids: Sequence[int], keep_blocks: bool = False
) -> Validation:
    """Sum up evaluated batches (every eligible anchor of each document, no gradient).

    Args:
        results: batch, its loss, and confidence logits `[N, g]` or None.
        eos_ids: tokens that end a text.
        keep_blocks: also return confidence logits and survival of every block.
    """
    sums = _Sums()
    first = 0 if sample_from_anchor else 1
    for batch, result, confidence in results:
        valid = (batch.slots >= 0)[:, first:]
        correct = result.correct[:, first:] & valid
        survived = correct.long().cumprod(1).bool()
        alive = torch.cat([valid[:, :1], survived[:, :-1] & valid[:, 1:]], dim=1)
        sums.hits.append((survived & valid).sum(0))
        sums.tries.append(alive.sum(0))
        accept = torch.where(valid, result.accept[:, first:], 0.0)
        sums.expected += float((1.0 + accept.cumprod(1).sum(1)).sum())
        sums.anchors += batch.anchors.shape[0]
        lengths = _kept(batch, survived.sum(1), valid.sum(1), eos_ids)
        accepted, rounds = replay(batch.document[batch.anchors], batch.anchors, lengths)
        sums.accepted += accepted
        sums.rounds += rounds
        sums.loss += float(result.loss.detach())
        sums.batches += 1
        if keep_blocks and confidence is not None:
            sums.blocks.append((confidence[:, first:].float(), survived, valid))
    hits, tries = torch.stack(sums.hits).sum(0), torch.stack(sums.tries).sum(0)
    blocks = [torch.cat(part) for part in zip(*sums.blocks, strict=True)] if sums.blocks else [None, None, None]
    return Validation(
        acceptance_length=1.0 + sums.accepted / max(1, sums.rounds),
        expected_length=sums.expected / max(1, sums.anchors),
        loss=sums.loss / max(1, sums.batches),
        conditional=(hits / tries.clamp(min=1)).tolist(),
        accepted=sums.accepted,
        rounds=sums.rounds,
        confidence_logits=blocks[0],
        survived=blocks[1],
        valid=blocks[2],
    )


def _kept(batch: Batch, accepted: Tensor, valid: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """`[N]` drafts that a round at each anchor keeps: all accepted ones, less the last token of an answer that was cut.

    Decoding up to a token limit never drafts the last token: a round adds one of the target's own behind the drafts.
    """
    end = batch.anchors + valid
    # Every eligible position is an anchor, so a block that ends where none is ends with its answer.
    ends = ~torch.isin(end, batch.anchors)
    cut = ends & ~torch.isin(batch.token_ids[end], torch.tensor(list(eos_ids), device=end.device))
    return torch.where(cut & (accepted == valid), valid - 1, accepted)


def replay(document: Tensor, anchors: Tensor, lengths: Tensor) -> tuple[int, int]:
    """Walk greedy decoding over evaluated anchors.

    Args:
        document: `[N]` document of each anchor, ascending.
        anchors: `[N]` packed index of each anchor, ascending.
        lengths: `[N]` accepted drafts of the block at each anchor.

    Returns:
        (accepted drafts, rounds). A round at anchor p with a accepted drafts continues at p + a + 1.
    """
    accepted = rounds = 0
    current, reach = -1, -1
    for doc, anchor, length in zip(document.tolist(), anchors.tolist(), lengths.tolist(), strict=True):
        if doc != current:
            current, reach = doc, anchor
        if anchor >= reach:
            accepted += length
            rounds += 1
            reach = anchor + length + 1
    return accepted, rounds
