"""Small EAGLE drafters, and the definition written out pair by pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from block_cases import TINY
from torch import Tensor
from torch.nn import functional as F

from firesteel.batches.batch import Batch
from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.drafters.eagle import EagleDrafter, EagleLayer
from firesteel.drafters.registry import get_spec

FLAGS: dict[str, Any] = {"layer_style": "llama", "norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
EAGLE3 = replace(
    TINY,
    algorithm="eagle3",
    num_layers=1,
    layer_types=(FULL,),
    block_size=3,
    mask_token_id=None,
    causal=True,
    markov_rank=0,
    confidence_head=False,
    extra=FLAGS,
)
PEAGLE = replace(EAGLE3, algorithm="peagle", mask_token_id=49, extra={**FLAGS, "drop_ratio": 0.6, "drop_floor": 0.2})


def flagged(config: DraftConfig, **flags: Any) -> DraftConfig:
    return replace(config, extra={**config.extra, **flags})


VARIANTS = {
    "eagle3": EAGLE3,
    "eagle3-qwen3": flagged(EAGLE3, layer_style="qwen3"),
    "eagle3-raw-residual": flagged(EAGLE3, norm_before_residual=False, norm_output=True),
    "eagle3-norm-before-fc": flagged(EAGLE3, norm_before_fc=True),
    "eagle3-fc-norm": flagged(EAGLE3, fc_norm=True),
    "eagle3-two-layers": replace(EAGLE3, num_layers=2, layer_types=(FULL, FULL)),
    "eagle3-mixed": replace(EAGLE3, num_layers=2, layer_types=(SLIDING, FULL), sliding_window=4),
    "eagle3-reduced": replace(EAGLE3, draft_vocab_size=17),
    "peagle": PEAGLE,
    "peagle-two-layers": replace(flagged(PEAGLE, layer_style="qwen3"), num_layers=2, layer_types=(FULL, SLIDING), sliding_window=5),
}


def make_eagle(config: DraftConfig, seed: int = 0, *, dtype: torch.dtype = torch.float64) -> Any:
    """A drafter in which every parameter is random and of a size that matters."""
    torch.manual_seed(seed)
    drafter: Any = get_spec(config.algorithm).build(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=1.0 if name == "mask_hidden" else max(parameter.shape[1] ** -0.5, 0.2))
    return drafter.to(dtype)


def written_out(drafter: EagleDrafter, batch: Batch, embed: Tensor, anchor: int) -> Tensor:
    """States `[g, h]` of one chain, from the algorithm's words alone: one pair after another over a growing list of keys.

    EAGLE-3: a pair beyond the anchor's carries the drafter's own state of the pair before. P-EAGLE: it is the mask pair.
    """
    config = drafter.config
    document = int(batch.document[anchor])
    first = int((batch.document == document).nonzero()[0])
    keys: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in drafter.layers]
    outputs: list[Tensor] = []
    state = torch.empty(0)

    def run(embedding: Tensor, feature: Tensor, position: int) -> Tensor:
        x = feature
        for i, layer in enumerate(drafter.layers):
            assert isinstance(layer, EagleLayer)
            residual = x
            if i == 0:
                assert layer.hidden_norm is not None
                normed = layer.hidden_norm(feature)
                residual = normed if config.extra["norm_before_residual"] else feature
                y = torch.cat([layer.input_layernorm(embedding), normed])
            else:
                y = layer.input_layernorm(x)
            a = layer.self_attn
            q, k, v = (F.linear(y, p.weight).view(-1, config.head_dim) for p in (a.q_proj, a.k_proj, a.v_proj))
            if config.extra["layer_style"] == "qwen3":
                q, k = a.q_norm(q), a.k_norm(k)
            keys[i].append((position, turned(k, position, config), v))
            q = turned(q, position, config)
            slides = config.layer_types[i] == SLIDING
            seen = [(kk, vv) for at, kk, vv in keys[i] if not slides or position - at < config.sliding_window]
            mixed = []
            for head in range(config.num_heads):
                shared = head // (config.num_heads // config.num_kv_heads)
                scores = torch.stack([q[head] @ kk[shared] for kk, _ in seen]) / config.head_dim**0.5
                mixed.append(sum(w * vv[shared] for w, (_, vv) in zip(scores.softmax(0), seen, strict=True)))
            x = residual + F.linear(torch.cat(mixed), a.o_proj.weight)
            y = layer.post_attention_layernorm(x)
            x = x + F.linear(F.silu(F.linear(y, layer.mlp.gate_proj.weight)) * F.linear(y, layer.mlp.up_proj.weight), layer.mlp.down_proj.weight)
        return x

    for i in range(first + 1, anchor + 1):
        state = run(embed[batch.token_ids[i]], drafter.features(batch.context[i - 1]), int(batch.position[i]))
    outputs.append(drafter.norm(state))
    for k in range(1, config.block_size):
        position = int(batch.position[anchor]) + k
        if config.algorithm == "peagle":
            mask: Any = drafter
            state = run(embed[config.mask_token_id], drafter.features(mask.mask_hidden[0, 0]), position)
        else:
            token = batch.token_ids[min(anchor + k, len(batch.token_ids) - 1)]
            state = run(embed[token], outputs[-1] if config.extra["norm_output"] else state, position)
        outputs.append(drafter.norm(state))
    return torch.stack(outputs)


def turned(x: Tensor, position: int, config: DraftConfig) -> Tensor:
    """RoPE by complex numbers."""
    half = config.head_dim // 2
    angle = position * config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)
