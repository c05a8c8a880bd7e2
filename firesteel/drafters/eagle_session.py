"""Decoding sessions of EAGLE-3 and P-EAGLE: the pairs' keys and values are kept, drafts run a few positions behind them.

Batch 1, inference only. They compute what `training_rows` computes for an anchor behind the same text. Weights are packed once: keep a
session, and `rewind(0)` for the next sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.drafters.config import SLIDING, DraftConfig
from firesteel.drafters.eagle import EagleDrafter, EagleLayer, Streams
from firesteel.drafters.rope import rotate
from firesteel.drafters.rows import Draft
from firesteel.drafters.sequence import OneSequence, draw
from firesteel.errors import RecipeError
from firesteel.kernels.packed import PackedLinear


class _Layer:
    """Packed weights of one layer; queries, keys and values in one product."""

    def __init__(self, layer: EagleLayer, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.window = layer, window
        self.qkv = PackedLinear(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]))
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.out = PackedLinear(attention.o_proj.weight)
        self.gate, self.up, self.down = (PackedLinear(p.weight) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


class PairDrafter(Protocol):
    """What the session asks of a drafter of pairs, each of a token and the state before it."""

    @property
    def config(self) -> DraftConfig: ...

    @property
    def fc(self) -> nn.Linear: ...

    @property
    def norm(self) -> nn.Module: ...

    @property
    def rope(self) -> Any: ...

    def features(self, aux: Tensor) -> Tensor: ...


class EagleSession(OneSequence):
    """What sessions of pairs share; a chain of drafts (EAGLE-3) as it stands, `peagle.PEagleSession` overrides `_chain`.

    Args:
        drafter: trained module, which must not change meanwhile.
        embed: `[V, h]` the target's embedding.
        head: `[V_d, h]` rows of the target's LM head, or the same already packed.
        draft_to_target: `[V_d]` int64 target id of each draft id; None where the vocabularies are one.
        max_length: most positions that will ever be observed.
        confidence_temperatures: must be None; there is no confidence head.

    Raises:
        RecipeError: tables do not fit the drafter.
    """

    kept: ClassVar[dict[str, int]] = {"_keys": 2, "_values": 2, "_features": 0}

    @torch.no_grad()
    def __init__(
        self,
        drafter: PairDrafter,
        embed: Tensor,
        head: Tensor | PackedLinear,
        *,
        draft_to_target: Tensor | None,
        max_length: int,
        confidence_temperatures: Sequence[float] | None = None,
    ) -> None:
        if confidence_temperatures is not None:
            raise RecipeError(f"{len(confidence_temperatures)} confidence temperatures for a drafter without a confidence head")
        config, self.drafter, self.dtype = drafter.config, drafter, drafter.fc.weight.dtype
        super().__init__(config, drafter.fc.weight.device, draft_to_target, max_length, None)
        self._embed, self._head = embed.detach(), head if isinstance(head, PackedLinear) else PackedLinear(head.to(self.dtype))
        self._pack()
        self._cos, self._sin = drafter.rope.table(torch.arange(max_length + config.block_size, device=self.device), self.dtype)
        self._keys = torch.empty(config.num_layers, config.num_kv_heads, 0, config.head_dim, dtype=self.dtype, device=self.device)
        self._values = torch.empty_like(self._keys)
        self._features = torch.empty(0, config.hidden_size, dtype=self.dtype, device=self.device)  # f_i of every observed position

    @torch.inference_mode()
    def observe(self, tokens: Sequence[int] | Tensor, aux: Tensor) -> None:
        """Take the next n positions: token ids `[n]` and captured states `[n, m * d]`.

        Raises:
            ResourceError: more positions than `max_length`.
        """
        ids, n = torch.as_tensor(tokens, dtype=torch.long, device=self.device), aux.shape[0]
        assert ids.shape[0] == n, "a token for every state"
        if n == 0:
            return
        start, end = self.begin_observing(n)
        self._features[start:end] = self.drafter.features(aux.to(self.device))
        self.length = end
        first = max(start, 1)  # position 0 has no state before it, and so no pair
        if first < end:
            pairs = (self._embedded(ids[first - start :]), self._features[first - 1 : end - 1])
            self._run(pairs, first, keys_only=True)

    @torch.inference_mode()
    def draft(self, anchor: int, count: int, *, temperature: float = 0.0, generator: torch.Generator | None = None) -> Draft:
        """Draft the tokens after `anchor`, which stands at position `length` and has no states yet.

        Args:
            anchor: target id of the last known token.
            count: tokens to draft, 1 to `config.num_drafts`.
            temperature: 0 is greedy; above, tokens are drawn from softmax(logits / temperature).
            generator: of the draws, on the drafter's device.
        """
        self.begin_draft(count)
        if self.length == 0:
            raise RecipeError("a drafter of pairs needs a state before the anchor, but nothing was observed", mend="observe the prompt first")
        return self._chain(anchor, count, temperature, generator)

    def _pack(self) -> None:
        assert isinstance(self.drafter, EagleDrafter)
        layers = zip((m for m in self.drafter.layers if isinstance(m, EagleLayer)), self.config.layer_types, strict=True)
        self._layers = [_Layer(layer, self.config.sliding_window if kind == SLIDING else None) for layer, kind in layers]

    def _chain(self, anchor: int, count: int, temperature: float, generator: torch.Generator | None) -> Draft:
        feature, token = self._features[self.length - 1], anchor
        tokens: list[int] = []
        probs: list[Tensor] = []
        for step in range(count):
            pair = (self._embedded(torch.tensor([token], device=self.device)), feature[None])
            state = self._run(pair, self.length + step)
            z = self.drafter.norm(state)
            token, p = self._pick(self._head(z)[0], temperature, generator)
            tokens.append(token)
            if p is not None:
                probs.append(p)
            feature = (z if self.config.extra["norm_output"] else state)[0]
        return Draft(tokens, torch.stack(probs) if probs else None, None)

    def _pick(self, logits: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[int, Tensor | None]:
        """A target id from `[V_d]` logits, and the distribution it was drawn from (None when greedy)."""
        probs = None
        if temperature > 0:
            probs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(-1)
            choice = draw(probs, generator)
        else:
            choice = int(logits.argmax())
        return choice if self.draft_to_target is None else int(self.draft_to_target[choice]), probs

    def _embedded(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._embed).to(self.dtype)

    def _run(self, x: Streams, start: int, *, keys_only: bool = False) -> Tensor:
        """Run n pairs at positions `start ...` causally behind those before; their keys and values are left in the cache.

        `keys_only`: stop where only keys and values of the last layer are still needed.
        """
        c, n = self.config, x[0].shape[0]
        end = start + n
        table = (self._cos[start:end], self._sin[start:end])
        stream: Tensor | Streams = x
        for i, packed in enumerate(self._layers):
            y, residual = packed.layer.enter(stream)
            q, k, v = packed.qkv(y).view(n, -1, c.head_dim).split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
            self._keys[i, :, start:end] = rotate(packed.k_norm(k), table).transpose(0, 1)
            self._values[i, :, start:end] = v.transpose(0, 1)
            if keys_only and i + 1 == len(self._layers):
                break
            low, mask = self._mask(start, n, packed.window)
            seen = F.scaled_dot_product_attention(
                rotate(packed.q_norm(q), table).transpose(0, 1)[None],
                self._keys[None, i, :, low:end],
                self._values[None, i, :, low:end],
                attn_mask=mask,
                enable_gqa=c.num_heads != c.num_kv_heads,
            )
            hidden = packed.out.plus(seen[0].transpose(0, 1).reshape(n, -1), residual)
            normed = packed.layer.post_attention_layernorm(hidden)
            stream = packed.down.plus(packed.up.times(normed, packed.gate.silu(normed)), hidden)
        return stream if isinstance(stream, Tensor) else stream[1]

    def _mask(self, start: int, n: int, window: int | None) -> tuple[int, Tensor | None]:
        """First position that any of n queries sees (there is no pair at 0), and what each sees from there (None: everything)."""
        low = 1 if window is None else max(1, start - window + 1)
        if n == 1:
            return low, None
        query, key = torch.arange(start, start + n, device=self.device)[:, None], torch.arange(low, start + n, device=self.device)
        seen = key <= query
        return low, seen if window is None else seen & (query - key < window)
