"""Small MTP heads of every family, and the definition written out pair by pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from block_cases import TINY
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3NextConfig

from firesteel.batches.batch import Batch
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.mtp_format import adapt_to_target
from firesteel.drafters.registry import get_spec

WIDTH, LAYERS = 32, 4
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
HYBRID: dict[str, Any] = {
    **SIZES,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
MROPE = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
PARTIAL = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
TARGETS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e4}),
    "qwen3_next": Qwen3NextConfig(**HYBRID, **EXPERTS, rope_parameters=PARTIAL),
    "qwen3_5": Qwen3_5TextConfig(**HYBRID, rope_parameters=MROPE),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**{k: v for k, v in HYBRID.items() if k != "intermediate_size"}, **EXPERTS, rope_parameters=MROPE),
}
_PLAIN = replace(
    TINY,
    algorithm="mtp",
    hidden_size=WIDTH,
    target_hidden_size=WIDTH,
    block_size=3,
    layer_ids=(1, LAYERS),
    mask_token_id=None,
    causal=True,
    markov_rank=0,
    confidence_head=False,
    extra={"beta": 0.6, "norm_output": True},
)


def mtp_config(name: str, **changes: Any) -> DraftConfig:
    return adapt_to_target(replace(_PLAIN, **changes), TARGETS[name].to_dict(), LAYERS)


def make_mtp(config: DraftConfig, seed: int = 0, *, dtype: torch.dtype = torch.float64) -> Any:
    """A drafter in which every parameter is random and of a size that matters."""
    torch.manual_seed(seed)
    drafter: Any = get_spec("mtp").build(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=max(parameter.shape[-1] ** -0.5, 0.2))
    return drafter.to(dtype)


def written_out(drafter: Any, batch: Batch, embed: Tensor, anchor: int) -> Tensor:
    """States `[g, h]` of one chain: one pair after another over a growing list of keys, all formulas written out anew (dense MLP only)."""
    mtp, config = drafter.mtp, drafter.config
    layer, offset, eps = mtp.layers[0], mtp.norm_offset, config.rms_norm_eps
    attention = layer.self_attn
    first = int((batch.document == batch.document[anchor]).nonzero()[0])
    keys: list[tuple[Tensor, Tensor]] = []

    def norm(module: Any, x: Tensor, own: float = offset) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (own + module.weight)

    def turned(x: Tensor, position: int) -> Tensor:
        share = config.extra["layer"]["rope_parameters"].get("partial_rotary_factor", 1.0)
        width = int(config.head_dim * share)
        angle = position * config.rope_theta ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
        z = torch.complex(x[:, : width // 2], x[:, width // 2 : width]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag, x[:, width:]], dim=-1)

    def run(embedding: Tensor, state: Tensor, position: int) -> Tensor:
        x = mtp.fc.weight @ torch.cat([norm(mtp.pre_fc_norm_embedding, embedding), norm(mtp.pre_fc_norm_hidden, state)])
        y = norm(layer.input_layernorm, x)
        q, k, v = (F.linear(y, p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        q = q.view(config.num_heads, -1)
        gate = q[:, config.head_dim :]
        q = turned(norm(attention.q_norm, q[:, : config.head_dim]), position)
        keys.append((turned(norm(attention.k_norm, k.view(config.num_kv_heads, -1)), position), v.view(config.num_kv_heads, -1)))
        mixed = []
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            weights = torch.stack([q[head] @ kk[shared] for kk, _ in keys]).div(config.head_dim**0.5).softmax(0)
            found = sum(w * vv[shared] for w, (_, vv) in zip(weights, keys, strict=True))
            mixed.append(found / (1 + (-gate[head]).exp()) if gate.numel() else found)
        x = x + attention.o_proj.weight @ torch.cat(mixed)
        y = norm(layer.post_attention_layernorm, x)
        x = x + layer.mlp.down_proj.weight @ (F.silu(layer.mlp.gate_proj.weight @ y) * (layer.mlp.up_proj.weight @ y))
        return norm(mtp.norm, x)

    state = torch.empty(0)
    for i in range(first + 1, anchor + 1):
        last = norm(drafter.target_norm, batch.context[i - 1, -config.hidden_size :], 0.0)
        state = run(embed[batch.token_ids[i]], last, int(batch.position[i]))
    outputs = [state]
    for k in range(1, config.block_size):
        token = batch.token_ids[min(anchor + k, len(batch.token_ids) - 1)]
        outputs.append(run(embed[token], outputs[-1], int(batch.position[anchor]) + k))
    return torch.stack(outputs)
