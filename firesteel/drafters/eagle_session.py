"""Decoding sessions of EAGLE-3 and P-EAGLE: the pairs' keys and values are kept, drafts run a few positions behind them.

Batch 1, inference only. They compute what `training_rows` computes for an anchor behind the same text. Weights are packed once: keep a
session, and `rewind(0)` for the next sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.drafters.config import SLIDING, DraftConfig
from firesteel.drafters.eagle import EagleDrafter, EagleLayer, Streams
from firesteel.drafters.rope import rotate
from firesteel.drafters.rows import Draft
from firesteel.errors import RecipeError, ResourceError
from firesteel.kernels.packed import PackedLinear

_FIRST_CAPACITY = 512  # positions to make room for at first; doubled as needed


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


class EagleSession:
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
        config = self.config = drafter.config
        if confidence_temperatures is not None:
            raise RecipeError(f"{len(confidence_temperatures)} confidence temperatures for a drafter without a confidence head")
        if config.reduced_vocab and draft_to_target is None:
            raise RecipeError("a drafter with a reduced vocabulary needs draft_to_target", mend="pass the target id of each draft id (id + d2t[id])")
        if draft_to_target is not None and draft_to_target.shape != (config.draft_vocab_size,):
            raise RecipeError(f"draft_to_target has {list(draft_to_target.shape)} entries for a draft vocabulary of {config.draft_vocab_size}")
        self.drafter, self.max_length, self.length = drafter, max_length, 0
        self.device, self.dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
        self.draft_to_target = None if draft_to_target is None else draft_to_target.to(self.device)
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
        ids, n, start = torch.as_tensor(tokens, dtype=torch.long, device=self.device), aux.shape[0], self.length
        assert ids.shape[0] == n, "a token for every state"
        if n == 0:
            return
        if start + n > self.max_length:
            raise ResourceError(f"a drafting session for {self.max_length} positions was given {start + n}", mend="open the session with a higher max_length")
        self._reserve(start + n + self.config.block_size)
        self._features[start : start + n] = self.drafter.features(aux.to(self.device))
        self.length = start + n
        first = max(start, 1)  # position 0 has no state before it, and so no pair
        if first < start + n:
            pairs = (self._embedded(ids[first - start :]), self._features[first - 1 : start + n - 1])
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
        if not 1 <= count <= self.config.num_drafts:
            raise RecipeError(f"cannot draft {count} tokens with a drafter of {self.config.num_drafts} steps", mend=f"draft 1 to {self.config.num_drafts}")
        if self.length == 0:
            raise RecipeError("an EAGLE drafter needs a state before the anchor, but nothing was observed", mend="observe the prompt first")
        self._reserve(self.length + self.config.block_size)
        return self._chain(anchor, count, temperature, generator)

    def rewind(self, length: int) -> None:
        """Forget all positions from `length` on."""
        if not 0 <= length <= self.length:
            raise RecipeError(f"cannot rewind a session of {self.length} positions to {length}")
        self.length = length

    def expand(self, probs: Tensor) -> Tensor:
        """`[n, V_d]` over the draft vocabulary -> `[n, V]` over the target's (the same tensor where they are one)."""
        if self.draft_to_target is None:
            return probs
        return probs.new_zeros(probs.shape[0], self.config.vocab_size).index_copy_(1, self.draft_to_target, probs)

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
            probs = (logits.float() / temperature).softmax(-1)
            # argmax(p / E) with E exponential is a draw from p.
            choice = (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax()
        else:
            choice = logits.argmax()
        return int(choice if self.draft_to_target is None else self.draft_to_target[choice]), probs

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

    def _reserve(self, positions: int) -> None:
        """Make room for this many positions, keeping what is there."""
        room = self._keys.shape[2]
        if positions <= room:
            return
        room = min(max(positions, 2 * room, _FIRST_CAPACITY), self.max_length + self.config.block_size)
        for name in ("_keys", "_values"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(old.shape[0], old.shape[1], room, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)
        features = self._features.new_empty(room, self._features.shape[1])
        features[: self.length] = self._features[: self.length]
        self._features = features
