"""LatentSession: a drafter with latent attention at work on one sequence.

It keeps what a server keeps: per layer and position the normalised latent and the rotated shared part of the keys, `[l ; R(r)]`. Keys
and values of the heads are never made: `W_UK` is folded into the queries and `W_UV` into the output, so that all heads attend to the same
latents. That is the same sum in another order than training's, which `LatentDrafter` writes out. Batch 1, inference only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from firesteel.drafters.block import mask_token
from firesteel.drafters.latent import LatentDrafter, LatentLayer
from firesteel.drafters.pick import TokenPicker
from firesteel.drafters.rows import Draft
from firesteel.drafters.sequence import OneSequence
from firesteel.errors import RecipeError
from firesteel.kernels.packed import PackedLinear


class LatentSession(OneSequence):
    """Drafts for one sequence.

    Args:
        drafter: trained module, which must not change meanwhile.
        embed: `[V, h]` the target's embedding.
        head: `[V, h]` the target's LM head, or the same already packed.
        draft_to_target: None; this backbone has the target's whole vocabulary.
        max_length: most positions that will ever be observed.
        confidence_temperatures: one per drafted position (sequential temperature scaling), or None for 1.

    Raises:
        RecipeError: tables or temperatures do not fit the drafter.
    """

    kept: ClassVar[dict[str, int]] = {"_cache": 1}

    @torch.no_grad()
    def __init__(
        self,
        drafter: LatentDrafter,
        embed: Tensor,
        head: Tensor | PackedLinear,
        *,
        draft_to_target: Tensor | None,
        max_length: int,
        confidence_temperatures: Sequence[float] | None = None,
    ) -> None:
        if draft_to_target is not None:
            raise RecipeError("a drafter with latent attention has the target's whole vocabulary", mend="leave out drafter.draft_vocab_size")
        config, self.drafter, self.dtype = drafter.config, drafter, drafter.context_proj.weight.dtype
        super().__init__(config, drafter.context_proj.weight.device, None, max_length, confidence_temperatures)
        self._layers = [layer for layer in drafter.layers if isinstance(layer, LatentLayer)]
        self._sizes = self._layers[0].self_attn.sizes
        self._cos, self._sin = drafter.rope.table(torch.arange(max_length + config.block_size, device=self.device), self.dtype)  # [P, 1, rope/2]
        self._cache = torch.empty(config.num_layers, 0, self._sizes.latent, dtype=self.dtype, device=self.device)
        self._embed = embed.detach()
        packed = head if isinstance(head, PackedLinear) else PackedLinear(head.to(self.dtype))
        self._picker = TokenPicker(packed, drafter.markov_head, drafter.confidence_head, None, confidence_temperatures)

    @torch.inference_mode()
    def observe(self, tokens: Sequence[int] | Tensor, aux: Tensor) -> None:
        """Take the captured states `[n, m * d]` of the next n positions; their tokens are in the states already.

        Raises:
            ResourceError: more positions than `max_length`.
        """
        start, end = self.begin_observing(aux.shape[0])
        context = self.drafter.context_norm(F.linear(aux.to(self.device, self.dtype), self.drafter.context_proj.weight))
        for layer, cache in zip(self._layers, self._cache, strict=True):
            cache[start:end] = self._latents(layer, context, start)
        self.length = end

    @torch.inference_mode()
    def draft(self, anchor: int, count: int, *, temperature: float = 0.0, generator: torch.Generator | None = None) -> Draft:
        """Draft the tokens after `anchor`, which stands at position `length` and has no states yet.

        Args:
            anchor: target id of the last known token.
            count: tokens to draft, 1 to `config.num_drafts`. The whole block runs whatever the count, as in training.
            temperature: 0 is greedy; above, tokens are drawn from softmax(logits / temperature).
            generator: of the draws, on the drafter's device.
        """
        self.begin_draft(count)
        picked = self._picker.pick(self.states(anchor)[:count], anchor, temperature, generator)
        return Draft(picked.tokens, picked.probs, picked.confidences)

    @torch.inference_mode()
    def states(self, anchor: int) -> Tensor:
        """Final hidden states `[g, h]` of the block behind `anchor`."""
        end = self.length + self.config.block_size
        self.reserve(end)
        ids = torch.full((self.config.block_size,), mask_token(self.config), device=self.device)
        ids[0] = anchor
        x = F.embedding(ids, self._embed).to(self.dtype)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            y = layer.input_layernorm(x)
            cache[self.length : end] = self._latents(layer, y, self.length)
            x = x + self._attend(layer, y, cache[:end])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.drafter.final_norm(x)

    def _table(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        return self._cos[start : start + count], self._sin[start : start + count]

    def _latents(self, layer: LatentLayer, x: Tensor, start: int) -> Tensor:
        """`x [n, h]` of positions from `start` on -> `[n, kv_rank + rope]`."""
        return torch.cat(layer.self_attn.latents(x, self._table(start, x.shape[0])), dim=-1)

    def _attend(self, layer: LatentLayer, y: Tensor, latents: Tensor) -> Tensor:
        """Normed block inputs `[g, h]` against `[length + g, kv_rank + rope]` -> `[g, h]`; all slots see everything."""
        attention, sizes = layer.self_attn, self._sizes
        up_k, up_v = attention.up_projections()
        plain, turned = attention.queries(y, self._table(self.length, y.shape[0])).split([sizes.nope, sizes.rope], dim=-1)  # [g, H, .]
        queries = torch.cat([torch.einsum("ghn,hnl->hgl", plain, up_k), turned.transpose(0, 1)], dim=-1)  # [H, g, kv_rank + rope]
        # One head of keys for all queries, so heads and slots are rows of it.
        rows = queries.reshape(1, 1, -1, sizes.latent)
        mixed = F.scaled_dot_product_attention(rows, latents[None, None], latents[None, None, :, : sizes.kv_rank], scale=sizes.key**-0.5)
        values = torch.einsum("hgl,hvl->ghv", mixed.view(attention.heads, -1, sizes.kv_rank), up_v)
        return F.linear(values.flatten(1), attention.o_proj.weight)
