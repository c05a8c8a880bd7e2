"""Validation: the acceptance length that decoding would reach on held-out, target-written text.

Loss is a poor judge of a drafter: what counts is how many tokens a round yields. With every anchor of a document evaluated,
greedy decoding can be replayed exactly: start at the first answer token, accept while draft and text agree, jump behind the
accepted tokens, repeat. The text is what the target itself wrote (greedily, also where training answers are sampled), so this is
the acceptance length that the reference decoder reaches at temperature 0, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.batches.batch import Batch
from firesteel.losses.types import LossResult
from firesteel.training.parallel import ALONE, World


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
class _Part:
    """What one batch adds."""

    loss: float
    expected: float
    anchors: int
    accepted: int
    rounds: int
    hits: Tensor
    tries: Tensor
    blocks: tuple[Tensor, Tensor, Tensor] | None


def validate(
    results: Iterable[tuple[Batch, LossResult, Tensor | None]],
    *,
    sample_from_anchor: bool,
    eos_ids: Sequence[int],
    keep_blocks: bool = False,
    world: World = ALONE,
) -> Validation:
    """Sum up evaluated batches (every eligible anchor of each document, no gradient).

    Args:
        results: batch, its loss, and confidence logits `[N, g]` or None.
        eos_ids: tokens that end a text.
        keep_blocks: also return confidence logits and survival of every block.
        world: processes of which each has every `size`-th batch; all get what one that has all batches would, bit for bit.
    """
    first = 0 if sample_from_anchor else 1
    parts = world.collect([_part(batch, result, confidence if keep_blocks else None, first, eos_ids) for batch, result, confidence in results])
    accepted, rounds, anchors = sum(p.accepted for p in parts), sum(p.rounds for p in parts), sum(p.anchors for p in parts)
    hits, tries = torch.stack([p.hits for p in parts]).sum(0), torch.stack([p.tries for p in parts]).sum(0)
    kept = [p.blocks for p in parts if p.blocks is not None]
    blocks = [torch.cat(part) for part in zip(*kept, strict=True)] if kept else [None, None, None]
    return Validation(
        acceptance_length=1.0 + accepted / max(1, rounds),
        expected_length=sum(p.expected for p in parts) / max(1, anchors),
        loss=sum(p.loss for p in parts) / max(1, len(parts)),
        conditional=(hits / tries.clamp(min=1)).tolist(),
        accepted=accepted,
        rounds=rounds,
        confidence_logits=blocks[0],
        survived=blocks[1],
        valid=blocks[2],
    )


def _part(batch: Batch, result: LossResult, confidence: Tensor | None, first: int, eos_ids: Sequence[int]) -> _Part:
    valid = (batch.slots >= 0)[:, first:]
    correct = result.correct[:, first:] & valid
    survived = correct.long().cumprod(1).bool()
    alive = torch.cat([valid[:, :1], survived[:, :-1] & valid[:, 1:]], dim=1)
    accept = torch.where(valid, result.accept[:, first:], 0.0)
    lengths = _kept(batch, survived.sum(1), valid.sum(1), eos_ids)
    accepted, rounds = replay(batch.document[batch.anchors], batch.anchors, lengths)
    return _Part(
        loss=float(result.loss.detach()),
        expected=float((1.0 + accept.cumprod(1).sum(1)).sum()),
        anchors=batch.anchors.shape[0],
        accepted=accepted,
        rounds=rounds,
        hits=(survived & valid).sum(0).cpu(),
        tries=alive.sum(0).cpu(),
        blocks=None if confidence is None else (confidence[:, first:].float().cpu(), survived.cpu(), valid.cpu()),
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
