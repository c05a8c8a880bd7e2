"""Decoding session of an MTP head: the pairs' keys and values are kept, a chain of drafts runs a few positions behind them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from firesteel.drafters.eagle import Streams
from firesteel.drafters.eagle_session import EagleSession
from firesteel.drafters.mtp import MtpDrafter
from firesteel.drafters.target_layer import turn
from firesteel.kernels.packed import PackedLinear


class MtpSession(EagleSession):
    """As `EagleSession`, with the target's own layer; see there. Batch 1, inference only."""

    def _pack(self) -> None:
        assert isinstance(self.drafter, MtpDrafter)
        layer = self._layer = self.drafter.layer
        own, mlp = layer.attention, layer.module.mlp
        self._fc = PackedLinear(self.drafter.fc.weight)
        rows = [p.weight for p in (own.q_proj, own.k_proj, own.v_proj)]
        biases = [p.bias for p in (own.q_proj, own.k_proj, own.v_proj)]
        self._qkv = PackedLinear(torch.cat(rows), None if biases[0] is None else torch.cat(biases))
        self._out = PackedLinear(own.o_proj.weight, own.o_proj.bias)
        plain = hasattr(mlp, "gate_proj") and self.config.hidden_act == "silu"
        self._mlp = [PackedLinear(p.weight) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)] if plain else None

    def _run(self, x: Streams, start: int, *, keys_only: bool = False) -> Tensor:
        """Run n pairs at indices `start ...` causally behind those before; their keys and values are left in the cache."""
        c, n, layer, drafter = self.config, x[0].shape[0], self._layer, self.drafter
        assert isinstance(drafter, MtpDrafter)
        end, mtp = start + n, drafter.mtp
        table = (self._cos[start:end], self._sin[start:end])
        stream = self._fc(torch.cat([layer.norm(mtp.pre_fc_norm_embedding, x[0]), layer.norm(mtp.pre_fc_norm_hidden, x[1])], dim=-1))
        split = [c.num_heads * (2 if layer.gated else 1), c.num_kv_heads, c.num_kv_heads]
        q, k, v = self._qkv(layer.enter(stream)).view(n, -1, c.head_dim).split(split, dim=1)
        self._keys[0, :, start:end] = turn(layer.norm(layer.attention.k_norm, k), table).transpose(0, 1)
        self._values[0, :, start:end] = v.transpose(0, 1)
        if keys_only:
            return stream
        q = q.reshape(n, c.num_heads, -1)
        q, gate = q.chunk(2, dim=-1) if layer.gated else (q, None)
        low, mask = self._mask(start, n, None)
        seen = F.scaled_dot_product_attention(
            turn(layer.norm(layer.attention.q_norm, q), table).transpose(0, 1)[None],
            self._keys[None, 0, :, low:end],
            self._values[None, 0, :, low:end],
            attn_mask=mask,
            enable_gqa=c.num_heads != c.num_kv_heads,
        )
        mixed = seen[0].transpose(0, 1)
        mixed = mixed if gate is None else mixed * gate.sigmoid()
        hidden = self._out.plus(mixed.reshape(n, -1), stream)
        normed = layer.norm(layer.module.post_attention_layernorm, hidden)
        if self._mlp is None:
            return hidden + layer.mlp(normed)
        gate_proj, up, down = self._mlp
        return down.plus(up.times(normed, gate_proj.silu(normed)), hidden)
