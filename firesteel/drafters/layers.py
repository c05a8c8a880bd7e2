"""The parts of a draft layer, Qwen3-style. Parameter names are the keys of a checkpoint (vLLM's and speculators' format)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.drafters.attention import Attend
from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.drafters.rope import rotate
from firesteel.errors import CheckpointError
from firesteel.kernels.linear import linear

Table = tuple[Tensor, Tensor]


def check_layers(config: DraftConfig) -> None:
    """Refuse layers that a drafter cannot have, whatever its algorithm.

    Raises:
        CheckpointError: names the field.
    """
    unknown = set(config.layer_types) - {FULL, SLIDING}
    if unknown:
        raise CheckpointError(f"layer type {sorted(unknown)[0]!r} is not known", mend=f"a drafter's layers are {FULL} or {SLIDING}")
    if config.hidden_act != "silu":
        raise CheckpointError(f"activation {config.hidden_act!r} is not known", mend="the MLP of a drafter is SwiGLU (silu), which is what vLLM serves")
    if config.hidden_size != config.target_hidden_size:
        raise CheckpointError(
            f"a drafter of width {config.hidden_size} cannot share embedding and LM head of a target of width {config.target_hidden_size}",
            mend="the hidden size of a drafter is the target's",
        )


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang & Sennrich 2019); statistics in float32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Projection(nn.Linear):
    """`x [..., k] -> [..., m]` by a matrix alone. Sharded training gathers the matrix around the call, so its weight must not be used elsewhere in it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Projections of block and context (DFlash, arXiv 2602.06036): `K = [W_K c ; W_K z]`, `V = [W_V c ; W_V z]`, queries of the block only.

    Args:
        width: what the projections of queries, keys and values read; None is the hidden size.
        qk_norm: normalise queries and keys per head (Qwen3), or not (Llama).
    """

    def __init__(self, config: DraftConfig, width: int | None = None, *, qk_norm: bool = True) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = width or config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm: Any = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm: Any = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()

    def queries(self, x: Tensor, table: Table) -> Tensor:
        """`[..., h]` -> `[..., H, D]`, normalised and rotated."""
        q = linear(x, self.q_proj.weight).unflatten(-1, (self.heads, self.head_dim))
        return rotate(self.q_norm(q), table)

    def keys_values(self, x: Tensor, table: Table) -> tuple[Tensor, Tensor]:
        """`[..., h]` -> keys (normalised, rotated) and values, each `[..., Hkv, D]`; the same for context and block."""
        k = linear(x, self.k_proj.weight).unflatten(-1, (self.kv_heads, self.head_dim))
        v = linear(x, self.v_proj.weight).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(self.k_norm(k), table), v

    def out(self, mixed: Tensor) -> Tensor:
        """`[..., H, D]` -> `[..., h]`."""
        return linear(mixed.flatten(-2), self.o_proj.weight)


class DraftLayer(nn.Module):
    """One decoder layer over block inputs; context features enter its keys and values as they are (no layer norm of their own)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, block_table: Table, context_table: Table, attend: Attend) -> Tensor:
        """`x [N, g, h]`, context features `[T, h]`, RoPE tables of both -> `[N, g, h]`."""
        y = self.input_layernorm(x)
        mixed = attend(self.self_attn.queries(y, block_table), self.self_attn.keys_values(context, context_table), self.self_attn.keys_values(y, block_table))
        x = x + self.self_attn.out(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))
