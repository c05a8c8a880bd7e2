"""Batched incremental decoding: many prompts side by side, left-padded, with a cache whose finished rows can leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class TransformersBatch:
    """Rows of one batch, in step; any causal model, through its own forward pass."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def start(self, prompts: Sequence[list[int]]) -> Tensor:
        """Read the prompts; logits `[B, V]` of their last tokens."""
        ids, self.mask = (t.to(self.model.device) for t in left_pad(prompts))
        self.cache = DynamicCache(config=self.model.config.get_text_config())
        return self._forward(ids)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one token per row `[B]`; logits `[B, V]`."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], 1)], dim=1)
        return self._forward(tokens[:, None].to(self.mask.device))

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only (`[k]` indices)."""
        self.cache.reorder_cache(rows.to(self.mask.device))  # batch_select_indices, which recurrent layers lack too, does the same
        self.mask = self.mask[rows.to(self.mask.device)]

    def _forward(self, ids: Tensor) -> Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(input_ids=ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].float()


def left_pad(rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of ids -> ids `[B, T]` and mask `[B, T]` (1 where a token stands), padded on the left."""
    width = max(len(r) for r in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
        mask[i, width - len(row) :] = 1
    return ids, mask
