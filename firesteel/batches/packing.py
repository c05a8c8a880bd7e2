"""From documents to batches: which go together, and how blocks, targets and labels are laid out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.batches.anchors import eligible_anchors, spaced_anchors
from firesteel.batches.batch import Batch
from firesteel.batches.vocab import DraftVocab
from firesteel.errors import HiddenStateError
from firesteel.hidden.sample import HiddenSample


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """What packing must know of the drafter and the loss.

    Attributes:
        block_size: slots of a block, g.
        sample_from_anchor: True: slot k predicts the token k + 1 after the anchor; False: k after it, slot 0 nothing.
        weights: `[g]` float32, positive static weight of each slot (slot 0's is not used without sample_from_anchor).
        vocab: the reduced draft vocabulary, or None where the draft has the target's own.
    """

    block_size: int
    sample_from_anchor: bool
    weights: Tensor
    vocab: DraftVocab | None


def plan_epoch(lengths: Sequence[int], batch_tokens: int, generator: torch.Generator) -> list[list[int]]:
    """Which documents (by number) go into which batch of one epoch; each goes into exactly one.

    Documents are taken in random order, each into the batch with the least room that still holds it (best fit), and the
    batches are then shuffled. A document longer than `batch_tokens` is a batch of its own. The plan depends only on
    lengths, size and generator: to resume within an epoch, plan again and start at the next batch's number.
    """
    batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, batch number) of batches that are not full, ascending
    for document in torch.randperm(len(lengths), generator=generator).tolist():
        length = lengths[document]
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, batch = rooms.pop(at)
            batches[batch].append(document)
        else:
            room, batch = batch_tokens, len(batches)
            batches.append([document])
        if room > length:
            insort(rooms, (room - length, batch))
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def pack(samples: Sequence[HiddenSample], anchors: Sequence[Tensor], layout: BlockLayout) -> Batch:
    """Lay documents out one after another, with their anchor blocks, as `Batch` describes.

    A block's slots end before the first token that is past its document or not supervised: in serving the target would
    have stopped, or someone else would have spoken, there.

    Args:
        samples: the documents; states of any floating dtype come out as float32.
        anchors: `[A_i]` int64 of each document, positions within it.
        layout: shape, weights and vocabulary of the blocks.

    Raises:
        HiddenStateError: a sample lacks the target's state for a supervised token.
    """
    lengths = torch.tensor([len(s) for s in samples])
    starts = lengths.cumsum(0) - lengths
    token_ids = torch.cat([s.token_ids for s in samples])
    document = torch.arange(len(samples)).repeat_interleave(lengths)
    at = torch.cat([a + start for a, start in zip(anchors, starts, strict=True)]).sort().values
    assert all(a.numel() == 0 or 0 <= int(a.min()) <= int(a.max()) < len(s) for a, s in zip(anchors, samples, strict=True)), "anchor outside its document"

    slots = _slots(at, document, torch.cat([s.loss_mask for s in samples]), layout)
    valid = slots >= 0
    needed, row = torch.unique(slots[valid] - 1, return_inverse=True)  # [U] packed positions ascending, row of each valid slot
    slot_target = torch.full_like(slots, -1)
    slot_target[valid] = row
    labels = token_ids if layout.vocab is None else layout.vocab.to_draft(token_ids)
    target_last, target_lognorm = _gather_targets(samples, starts, needed)
    return Batch(
        token_ids=token_ids,
        document=document,
        position=torch.arange(token_ids.shape[0]) - starts[document],
        context=_context(samples, token_ids.shape[0]),
        anchors=at,
        slots=slots,
        weights=torch.where(valid, layout.weights.float(), 0.0),
        target_last=target_last,
        slot_target=slot_target,
        draft_labels=torch.where(valid, labels[slots], -1),
        target_lognorm=target_lognorm,
    )


def eval_batches(samples: Iterable[HiddenSample], batch_tokens: int, anchors: int | None, layout: BlockLayout) -> Iterator[Batch]:
    """Held-out documents in their given order, without chance: the same blocks at every validation.

    Documents are read as they are needed; a batch closes before the one that would exceed `batch_tokens`. `anchors` is
    the most blocks per batch, evenly spaced over the eligible positions; None takes every one. Documents without an
    eligible position are left out.
    """
    group: list[HiddenSample] = []
    tokens = 0
    for sample in samples:
        if eligible_anchors(sample.loss_mask).numel() == 0:
            continue
        if group and tokens + len(sample) > batch_tokens:
            yield _pack_spaced(group, anchors, layout)
            group, tokens = [], 0
        group.append(sample)
        tokens += len(sample)
    if group:
        yield _pack_spaced(group, anchors, layout)


def _pack_spaced(group: Sequence[HiddenSample], anchors: int | None, layout: BlockLayout) -> Batch:
    return pack(group, spaced_anchors([eligible_anchors(s.loss_mask) for s in group], anchors), layout)


def _slots(at: Tensor, document: Tensor, loss_mask: Tensor, layout: BlockLayout) -> Tensor:
    """Packed anchors `[N]`, document numbers `[T]` and loss mask `[T]` -> `[N, g]` packed index that each slot predicts, -1 where none."""
    first = 0 if layout.sample_from_anchor else 1  # the first slot that predicts
    ahead = torch.arange(1, layout.block_size - first + 1)
    wanted = at[:, None] + ahead
    inside = wanted.clamp(max=document.shape[0] - 1)
    usable = (inside == wanted) & (document[inside] == document[at][:, None]) & loss_mask[inside]
    usable = usable.long().cumprod(1).bool()  # the first unusable token ends the block
    slots = torch.full((at.shape[0], layout.block_size), -1, dtype=torch.int64)
    slots[:, first:] = torch.where(usable, wanted, -1)
    return slots


def _context(samples: Sequence[HiddenSample], tokens: int) -> Tensor:
    """`[T, m*d]` float32 of all documents, converted in the one pass that copies."""
    context = torch.empty(tokens, samples[0].aux[0].numel())
    start = 0
    for s in samples:
        context[start : start + len(s)].copy_(s.aux.flatten(1))
        start += len(s)
    return context


def _gather_targets(samples: Sequence[HiddenSample], starts: Tensor, needed: Tensor) -> tuple[Tensor, Tensor | None]:
    """The target's last states `[U, d]` float32 and, if all documents have them, normalisers `[U]` at packed positions `[U]` (ascending)."""
    target_last = torch.empty(needed.shape[0], samples[0].last.shape[1])
    lognorm = torch.empty(needed.shape[0]) if all(s.last_lognorm is not None for s in samples) else None
    bounds = torch.searchsorted(needed, torch.cat([starts, starts[-1:] + len(samples[-1])])).tolist()
    for i, s in enumerate(samples):
        low, high = bounds[i], bounds[i + 1]
        row_of = torch.full((len(s),), -1, dtype=torch.int64)
        row_of[s.last_positions] = torch.arange(s.last_positions.shape[0])
        rows = row_of[needed[low:high] - starts[i]]
        if bool((rows < 0).any()):
            raise HiddenStateError(
                f"sample {s.key} lacks the target's last state at a position that a block predicts from",
                mend="the stage `extract` makes states anew: firesteel extract RECIPE",
            )
        target_last[low:high] = s.last[rows].float()
        if lognorm is not None and s.last_lognorm is not None:
            lognorm[low:high] = s.last_lognorm[rows].float()
    return target_last, lognorm
