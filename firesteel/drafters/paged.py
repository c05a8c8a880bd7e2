"""PagedBlockDrafter: the block drafters (DSpark, DFlash) at work on many sequences at once, their context in blocks.

It computes what `BlockSession` computes for one sequence: the blocks of all requests are rows of one matrix, each sees its own context. Keys
and values of a position come from the target's states there alone, so sequences with the same beginning may share its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from firesteel.drafters.block import BlockDrafter, mask_token
from firesteel.drafters.config import SLIDING
from firesteel.drafters.layers import DraftLayer
from firesteel.drafters.pick import TokenPicker
from firesteel.drafters.rows import Draft, Want
from firesteel.drafters.sequence import check_tables, over_target
from firesteel.drafters.session import PackedLayer
from firesteel.kernels.packed import PackedLinear
from firesteel.kernels.paged import Plan, Rotary, attend, make_caches, make_plan, rotate_and_store
from firesteel.kernels.spans import Span

# Requests from which on a slot's Markov bias is one product over the draft vocabulary for all of them; fewer are walked one by one, which
# reads a small part of the table only.
_TOGETHER = 3


def runs_paged(drafter: torch.nn.Module) -> TypeGuard[BlockDrafter]:
    """Whether this drafter's layers are what `PagedBlockDrafter` computes: float32 on a CPU, without anything of its own around them."""
    if not isinstance(drafter, BlockDrafter) or drafter.layer_class is not DraftLayer:
        return False
    weight = drafter.fc.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32


class PagedBlockDrafter:
    """Drafts for many sequences.

    Args:
        drafter: trained module that `runs_paged` accepts; it must not change meanwhile.
        embed, head, draft_to_target, confidence_temperatures: as of `BlockSession`.
        max_length: positions that one sequence may have.
        blocks: in the cache, shared with the target's.
        half: products in bfloat16. Drafts may differ where two tokens nearly tie; what is verified is still what was drawn from, so the text does not.
    """

    shares_prefix = True

    @torch.no_grad()
    def __init__(
        self,
        drafter: BlockDrafter,
        embed: Tensor,
        head: Tensor | PackedLinear,
        *,
        draft_to_target: Tensor | None,
        max_length: int,
        blocks: int,
        confidence_temperatures: Sequence[float] | None = None,
        half: bool = False,
    ) -> None:
        config = self.config = drafter.config
        check_tables(config, draft_to_target, confidence_temperatures)
        self.num_drafts, self.scratch = config.num_drafts, config.block_size
        self._first = 0 if config.sample_from_anchor else 1
        self._eps, self._group = config.rms_norm_eps, config.num_heads // config.num_kv_heads
        self._fc, self._hidden_norm, self._norm = PackedLinear(drafter.fc.weight, half=half), drafter.hidden_norm.weight.detach(), drafter.norm.weight.detach()
        modules = [layer for layer in drafter.layers if isinstance(layer, DraftLayer)]
        self._layers = [PackedLayer(layer, kind == SLIDING, half=half) for layer, kind in zip(modules, config.layer_types, strict=True)]
        self._context = [PackedLinear(torch.cat([m.self_attn.k_proj.weight, m.self_attn.v_proj.weight]), half=half) for m in modules]
        cos, sin = drafter.rope.table(torch.arange(max_length + config.block_size), torch.float32)
        self._rotary = Rotary(cos.flatten(1).contiguous(), sin.flatten(1).contiguous())
        self._caches = make_caches(config.num_layers, blocks, config.num_kv_heads, config.head_dim, torch.device("cpu"))
        self._embed, self._draft_to_target = embed.detach(), draft_to_target
        self._mask = F.embedding(torch.tensor(mask_token(config)), self._embed).float()
        self._markov, self._confidence = drafter.markov_head, drafter.confidence_head
        packed = head if isinstance(head, PackedLinear) else PackedLinear(head.float(), half=half)
        self._picker = TokenPicker(packed, drafter.markov_head, drafter.confidence_head, draft_to_target, confidence_temperatures)
        self._temperatures = torch.tensor(confidence_temperatures or [1.0] * config.num_drafts)
        self._w2: PackedLinear | None = None

    @torch.inference_mode()
    def observe(self, tokens: Tensor, spans: Sequence[Span], aux: Tensor) -> None:
        """Keys and values of the next positions, from the states `[N, m * d]`; the tokens are in the states already."""
        features = F.rms_norm(self._fc(aux.float()), self._hidden_norm.shape, self._hidden_norm, self._eps)
        plan = make_plan(spans, self._group)
        heads = self.config.num_heads
        for layer, context, cache in zip(self._layers, self._context, self._caches, strict=True):
            rotate_and_store(context(features), 0, cache, plan, self._rotary, (layer.qk_norm[heads:], self._eps))

    @torch.inference_mode()
    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        """One block each; as many of its tokens as wanted."""
        z = self.states([w.span for w in wants], [w.anchor for w in wants])[:, self._first :]
        greedy = [i for i, w in enumerate(wants) if w.temperature == 0]
        together = len(greedy) >= _TOGETHER or (len(greedy) > 1 and self._markov is None)
        found = dict(zip(greedy, self._walk(z[greedy], [wants[i] for i in greedy]), strict=True)) if together else {}
        return [found[i] if i in found else self._alone(z[i, : w.count], w) for i, w in enumerate(wants)]

    def forget(self, key: int) -> None:
        """Nothing: what was observed lies in blocks."""

    def states(self, spans: Sequence[Span], anchors: Sequence[int]) -> Tensor:
        """Final hidden states `[R, g, h]` of the blocks behind the anchors."""
        g, config = self.config.block_size, self.config
        blocks = [Span(s.key, s.blocks, s.start, g) for s in spans]
        plans: dict[bool, Plan] = {
            windowed: make_plan(blocks, self._group, window=config.sliding_window if windowed else None, causal=config.causal)
            for windowed in {layer.windowed for layer in self._layers}
        }
        x = self._mask.repeat(len(spans), g, 1)
        x[:, 0] = F.embedding(torch.tensor(anchors), self._embed)
        x = x.flatten(0, 1)
        scale = config.head_dim**-0.5
        for layer, cache in zip(self._layers, self._caches, strict=True):
            plan = plans[layer.windowed]
            # The blocks' own keys and values lie behind the context until the next positions overwrite them.
            qkv = layer.qkv(F.rms_norm(x, layer.input_norm.shape, layer.input_norm, self._eps))
            rotate_and_store(qkv, config.num_heads, cache, plan, self._rotary, (layer.qk_norm, self._eps))
            x = layer.out.plus(attend(qkv, config.num_heads, cache, plan, scale), x)
            y = F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, self._eps)
            x = layer.down.plus(layer.up.times(y, layer.gate.silu(y)), x)
        return F.rms_norm(x, self._norm.shape, self._norm, self._eps).view(len(spans), g, -1)

    def _alone(self, z: Tensor, want: Want) -> Draft:
        picked = self._picker.pick(z, want.anchor, want.temperature, want.generator)
        return Draft(
            picked.tokens, None if picked.probs is None else over_target(picked.probs, self._draft_to_target, self.config.vocab_size), picked.confidences
        )

    def _walk(self, z: Tensor, wants: Sequence[Want]) -> list[Draft]:
        """Greedy tokens of several blocks `z [R, g, h]`, slot after slot for all of them."""
        slots = max(w.count for w in wants)
        z = z[:, :slots]
        base = self._picker.head(z.flatten(0, 1)).view(len(wants), slots, -1)
        previous, state = torch.tensor([w.anchor for w in wants]), None
        seen = [previous]
        for k in range(slots):
            logits = base[:, k]
            if self._markov is not None:
                if self._w2 is None:
                    self._w2 = PackedLinear(self._picker.table)
                row, state = self._markov.step(z[:, k], self._markov.embed(previous), state)
                logits = self._w2.plus(row, logits.contiguous())
            best = logits.argmax(dim=-1)
            previous = best if self._draft_to_target is None else self._draft_to_target[best]
            seen.append(previous)
        tokens = torch.stack(seen, dim=1)
        confidences = self._confidences(z, tokens[:, :-1])
        drafts = []
        for i, want in enumerate(wants):
            drafts.append(Draft(tokens[i, 1 : want.count + 1].tolist(), None, None if confidences is None else confidences[i][: want.count]))
        return drafts

    def _confidences(self, z: Tensor, previous: Tensor) -> list[list[float]] | None:
        """`z [R, n, h]`, tokens before each slot `[R, n]` -> `[R][n]`."""
        if self._confidence is None:
            return None
        e = self._markov.embed(previous) if self._confidence.with_markov and self._markov is not None else None
        rows: list[list[float]] = (self._confidence(z, e) / self._temperatures[: z.shape[1]]).sigmoid().tolist()
        return rows
