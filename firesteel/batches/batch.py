"""Batch: documents packed one after another, and the anchor blocks that are trained on them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from firesteel.batches.share import Share


@dataclass
class Batch:
    """T packed tokens, N anchor blocks of g slots, U unique predicted positions.

    An anchor at packed index p is the known token x_p; its block sees context features of its own document at
    positions < p only. `slots[n, k]` is the packed index of the token that slot k predicts: p + k + 1 with
    sample_from_anchor, p + k without (slot 0 then predicts nothing). Anchors are sorted by p.

    Attributes:
        token_ids: `[T]` int64, target vocabulary.
        document: `[T]` int64, number of the document a token belongs to, ascending from 0.
        position: `[T]` int64, position within the document (what RoPE sees).
        context: `[T, m*d]` captured states, layers side by side.
        anchors: `[N]` int64, packed index of each anchor.
        slots: `[N, g]` int64, packed index each slot predicts, -1 where none (past the document, unsupervised, or slot 0).
        weights: `[N, g]` float32, static weight of each slot; 0 exactly where `slots` is -1.
        target_last: `[U, d]` target's last states (before its final norm) for the unique predicted positions.
        slot_target: `[N, g]` int64, row of `target_last` that belongs to the slot (its predecessor's state), -1 where none.
            Rows are in ascending packed position.
        draft_labels: `[N, g]` int64, the true token in the *draft* vocabulary, -1 where none or not in it.
        target_lognorm: `[U]` float32 log-sum-exp of the target's logits (whole vocabulary), or None if not all documents have it.
        share: where several ranks share the batch, this one's part. Then the blocks are this rank's only, and `context` has its rows only.
    """

    token_ids: Tensor
    document: Tensor
    position: Tensor
    context: Tensor
    anchors: Tensor
    slots: Tensor
    weights: Tensor
    target_last: Tensor
    slot_target: Tensor
    draft_labels: Tensor
    target_lognorm: Tensor | None = None
    share: Share | None = None

    @property
    def block_size(self) -> int:
        return self.slots.shape[1]

    @property
    def context_position(self) -> Tensor:
        """Position within the document of each row of `context`."""
        return self.position if self.share is None else self.position[self.share.rows(self.position.shape[0])]

    def previous_tokens(self, sample_from_anchor: bool) -> Tensor:
        """`[N, g]` int64: the token before the one that each slot predicts (teacher forcing); the anchor's where the slot predicts nothing."""
        first = 0 if sample_from_anchor else -1
        offsets = torch.arange(self.block_size, device=self.anchors.device) + first
        index = (self.anchors[:, None] + offsets).clamp(max=self.token_ids.shape[0] - 1)
        index = torch.where(self.slots >= 0, index, self.anchors[:, None])
        return self.token_ids[index]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def divided(self, share: Share) -> Batch:
        """This rank's part: neighbouring blocks (they share most of their targets), and its rows of the context. Sums over ranks are the whole's."""
        blocks, rows = share.rows(self.anchors.shape[0]), share.rows(self.token_ids.shape[0])
        slot_target = self.slot_target[blocks].clone()
        valid = slot_target >= 0
        needed, row = torch.unique(slot_target[valid], return_inverse=True)  # ascending, as the whole's rows are
        slot_target[valid] = row
        return replace(
            self,
            context=self.context[rows].clone(),  # a view would keep all of it
            anchors=self.anchors[blocks],
            slots=self.slots[blocks],
            weights=self.weights[blocks],
            target_last=self.target_last[needed],
            slot_target=slot_target,
            draft_labels=self.draft_labels[blocks],
            target_lognorm=None if self.target_lognorm is None else self.target_lognorm[needed],
            share=share,
        )
