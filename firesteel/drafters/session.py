"""BlockSession: a block drafter at work on one sequence.

The session keeps keys and values of the context, made once per position as the target's states arrive; a draft then runs one
block of g slots against them. It computes what `BlockDrafter.training_rows` computes for an anchor behind the same context.
Batch 1, inference only. Weights are packed once: keep a session, and `rewind(0)` for the next sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from firesteel.drafters.block import BlockDrafter, mask_token
from firesteel.drafters.config import SLIDING
from firesteel.drafters.layers import DraftLayer
from firesteel.drafters.pick import Picker, TokenPicker
from firesteel.drafters.rows import Draft
from firesteel.drafters.sequence import OneSequence
from firesteel.kernels.packed import PackedLinear

# First position that any slot sees, and what each sees from there: `[rep * g, keys]` bool, or None for everything.
Mask = tuple[int, Tensor | None]


class PackedLayer:
    """Packed weights of one layer; queries, keys and values in one product; `half`: products in bfloat16."""

    def __init__(self, layer: DraftLayer, windowed: bool, *, half: bool = False) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.windowed = windowed
        self.input_norm, self.mlp_norm = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
        self.qkv = PackedLinear(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]), half=half)
        norms = [attention.q_norm.weight.expand(attention.heads, -1), attention.k_norm.weight.expand(attention.kv_heads, -1)]
        self.qk_norm = torch.cat(norms).detach()  # [H + Hkv, D]
        self.out = PackedLinear(attention.o_proj.weight, half=half)
        self.gate, self.up, self.down = (PackedLinear(p.weight, half=half) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


class BlockSession(OneSequence):
    """Drafts for one sequence.

    Args:
        drafter: trained module, which must not change meanwhile (most weights are packed copies).
        embed: `[V, h]` the target's embedding.
        head: `[V_d, h]` rows of the target's LM head, or the same already packed.
        draft_to_target: `[V_d]` int64 target id of each draft id; None where the vocabularies are one.
        max_length: most positions that will ever be observed.
        confidence_temperatures: one per drafted position (sequential temperature scaling), or None for 1.

    Raises:
        RecipeError: tables or temperatures do not fit the drafter.
    """

    kept: ClassVar[dict[str, int]] = {"_keys": 2, "_values": 2}

    @torch.no_grad()
    def __init__(
        self,
        drafter: BlockDrafter,
        embed: Tensor,
        head: Tensor | PackedLinear,
        *,
        draft_to_target: Tensor | None,
        max_length: int,
        confidence_temperatures: Sequence[float] | None = None,
    ) -> None:
        config, self.dtype = drafter.config, drafter.fc.weight.dtype
        super().__init__(config, drafter.fc.weight.device, draft_to_target, max_length, confidence_temperatures)
        self._window = config.sliding_window if all(kind == SLIDING for kind in config.layer_types) else None
        self._eps, self._heads, self._kv, self._dim = config.rms_norm_eps, config.num_heads, config.num_kv_heads, config.head_dim
        self._first = 0 if config.sample_from_anchor else 1
        self._fc, self._hidden_norm, self._norm = PackedLinear(drafter.fc.weight), drafter.hidden_norm.weight.detach(), drafter.norm.weight.detach()
        modules = [layer for layer in drafter.layers if isinstance(layer, DraftLayer)]
        self._layers = [self.pack_layer(layer, kind == SLIDING) for layer, kind in zip(modules, config.layer_types, strict=True)]
        # Context features are the same for all layers: keys and values of all come out of one product, [L, k | v, Hkv, D].
        self._context_kv = PackedLinear(torch.cat([w for layer in modules for w in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight)]))
        self._k_norms = torch.stack([layer.self_attn.k_norm.weight for layer in modules])[:, None]  # [L, 1, D]
        cos, sin = drafter.rope.table(torch.arange(max_length + config.block_size, device=self.device), self.dtype)
        self._cos, self._sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)  # [P, 1, D], for x * cos + swapped(x) * sin
        self._keys = torch.empty(config.num_layers, self._kv, 0, self._dim, dtype=self.dtype, device=self.device)
        self._values = torch.empty_like(self._keys)
        self._embed = embed.detach()
        self._inputs = F.embedding(torch.full((config.block_size,), mask_token(config), device=self.device), self._embed).to(self.dtype)
        packed_head = head if isinstance(head, PackedLinear) else PackedLinear(head.to(self.dtype))
        self._picker = self.make_picker(drafter, packed_head, confidence_temperatures)

    def pack_layer(self, layer: DraftLayer, windowed: bool) -> PackedLayer:
        """What `layer` needs of its weights."""
        return PackedLayer(layer, windowed)

    def make_picker(self, drafter: BlockDrafter, head: PackedLinear, temperatures: Sequence[float] | None) -> Picker:
        """What turns final hidden states into tokens."""
        return TokenPicker(head, drafter.markov_head, drafter.confidence_head, self.draft_to_target, temperatures)

    @torch.inference_mode()
    def observe(self, tokens: Sequence[int] | Tensor, aux: Tensor) -> None:
        """Take the captured states `[n, m * d]` of the next n positions; their tokens are in the states already.

        Raises:
            ResourceError: more positions than `max_length`.
        """
        start, end = self.begin_observing(aux.shape[0])
        n, place = end - start, slice(start - self.base, end - self.base)
        aux = aux[aux.shape[0] - n :]
        features = F.rms_norm(self._fc(aux.to(self.device, self.dtype)), self._hidden_norm.shape, self._hidden_norm, self._eps)
        both = self._context_kv(features).view(n, self.config.num_layers, 2, self._kv, self._dim)
        keys = F.rms_norm(both[:, :, 0], (self._dim,), None, self._eps) * self._k_norms
        keys = self._rotate(keys, self._cos[start:end, None], self._sin[start:end, None])
        self._keys[:, :, place] = keys.permute(1, 2, 0, 3)
        self._values[:, :, place] = both[:, :, 1].permute(1, 2, 0, 3)
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
        z = self.states(anchor)[self._first : self._first + count]
        picked = self._picker.pick(z, anchor, temperature, generator)
        return Draft(picked.tokens, picked.probs, picked.confidences)

    @torch.inference_mode()
    def states(self, anchor: int) -> Tensor:
        """Final hidden states `[g, h]` of the block behind `anchor`."""
        self.reserve(self.length + self.config.block_size)
        masks = {windowed: self._mask(windowed) for windowed in {layer.windowed for layer in self._layers}}
        x = self._inputs.clone()
        x[0] = self._embed[anchor]
        for i, layer in enumerate(self._layers):
            x = self.run_layer(i, layer, x, masks[layer.windowed])
        return F.rms_norm(x, self._norm.shape, self._norm, self._eps)

    def run_layer(self, i: int, layer: PackedLayer, x: Tensor, mask: Mask) -> Tensor:
        """Layer i of a block: `[g, h]` -> `[g, h]`."""
        y = F.rms_norm(x, layer.input_norm.shape, layer.input_norm, self._eps)
        x = layer.out.plus(self.attend(i, layer, y, mask), x)
        y = F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, self._eps)
        return layer.down.plus(layer.up.times(y, layer.gate.silu(y)), x)

    def attend(self, i: int, layer: PackedLayer, y: Tensor, mask: Mask) -> Tensor:
        """What layer i's heads gather from context and block for its normed inputs `[g, h]`: `[g, H * D]`."""
        g, start = self.config.block_size, self.length
        end, rotated = start + g, self._heads + self._kv
        qkv = layer.qkv(y).view(g, rotated + self._kv, self._dim)
        qk = F.rms_norm(qkv[:, :rotated], (self._dim,), None, self._eps) * layer.qk_norm
        qk = self._rotate(qk, self._cos[start:end], self._sin[start:end])
        # The block's own keys and values lie behind the context for the time of this call; the next one overwrites them.
        place = slice(start - self.base, end - self.base)
        self._keys[i, :, place] = qk[:, self._heads :].transpose(0, 1)
        self._values[i, :, place] = qkv[:, rotated:].transpose(0, 1)
        low, seen = mask
        looked = slice(low - self.base, end - self.base)
        # Query heads that share a key head become rows of it, so that keys need not be repeated.
        q = qk[:, : self._heads].transpose(0, 1).reshape(1, self._kv, -1, self._dim)
        mixed = F.scaled_dot_product_attention(q, self._keys[None, i, :, looked], self._values[None, i, :, looked], attn_mask=seen)
        return mixed.reshape(self._heads, g, self._dim).transpose(0, 1).reshape(g, -1)

    def _mask(self, windowed: bool) -> Mask:
        """First position that any slot sees, and what each sees from there: None for everything, or `[rep * g, keys]` bool."""
        g, start = self.config.block_size, self.length
        low = max(0, start - self.config.sliding_window + 1) if windowed else 0
        slides = windowed and start + g - 1 - low >= self.config.sliding_window
        if not slides and not self.config.causal:
            return low, None
        query, key = torch.arange(start, start + g, device=self.device)[:, None], torch.arange(low, start + g, device=self.device)
        seen = torch.ones(g, key.shape[0], dtype=torch.bool, device=self.device)
        if slides:
            seen &= query - key < self.config.sliding_window
        if self.config.causal:
            seen &= key <= query
        return low, seen.repeat(self._heads // self._kv, 1)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + x.roll(self._dim // 2, dims=-1) * sin
