"""A decoder layer of the target's own class, with attention over a context and a block: what an MTP head is made of.

Parameters live in Transformers' modules (so their names and shapes are those of the target's files); queries, keys and values are taken
out of them here, because attention over anchor blocks is ours. For one plain causal sequence the result is the class's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

from firesteel.drafters.rope import ROPE_KINDS, rope_kind, rotate
from firesteel.errors import CheckpointError
from firesteel.kernels.linear import linear

Table = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Family:
    """Where the classes of a `model_type` are: module and prefix of their names; what its norms add to their weight."""

    module: str
    prefix: str
    norm_offset: float


FAMILIES = {
    "qwen3": Family("qwen3", "Qwen3", 0.0),
    "qwen3_next": Family("qwen3_next", "Qwen3Next", 1.0),
    "qwen3_5_text": Family("qwen3_5", "Qwen3_5", 1.0),
    "qwen3_5_moe_text": Family("qwen3_5_moe", "Qwen3_5Moe", 1.0),
}


class TargetRope(nn.Module):
    """The target's own rotary positions, of text."""

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        family, config = FAMILIES[layer["model_type"]], make_layer_config(layer)
        classes: Any = _classes(family)
        name = f"{family.prefix}TextRotaryEmbedding" if hasattr(classes, f"{family.prefix}TextRotaryEmbedding") else f"{family.prefix}RotaryEmbedding"
        with torch.device("cpu"):  # as in `rope.Rope`
            self.own: Any = getattr(classes, name)(config)

    def table(self, positions: Tensor, dtype: Any) -> Table:
        """Cosine and sine, each `[..., 1, R/2]`, of pairs i at positions `[...]`; R is the width of a head's rotated part.

        As servers count: the pair of token i and state i - 1 stands at i - 1. (Attention sees differences only; this is for the last bit.)
        """
        cos, sin = self.own(positions.new_zeros(1, dtype=dtype), positions.reshape(1, -1) - 1)
        half = cos.shape[-1] // 2
        cos, sin = (t[0, :, :half].reshape(*positions.shape, 1, half) for t in (cos, sin))
        return cos, sin


class TargetLayer:
    """The computations of one layer, in parts; holds no parameters.

    Args:
        module: a decoder layer with full attention, of a class in `FAMILIES`.
        norm_offset: what its norms add to their weight.
    """

    def __init__(self, module: Any, norm_offset: float) -> None:
        self.module, self.attention, self.norm_offset = module, module.self_attn, norm_offset
        self.head_dim = int(module.self_attn.head_dim)
        self.kv_heads = module.self_attn.k_proj.out_features // self.head_dim
        self.heads = module.self_attn.o_proj.in_features // self.head_dim
        self.gated = module.self_attn.q_proj.out_features == 2 * self.heads * self.head_dim

    def norm(self, module: Any, x: Tensor) -> Tensor:
        """RMSNorm by the weights of one of the class's norms."""
        return F.rms_norm(x, module.weight.shape, module.weight + self.norm_offset if self.norm_offset else module.weight, _eps(module))

    def enter(self, x: Tensor) -> Tensor:
        """`[..., h]` -> what the attention reads."""
        return self.norm(self.module.input_layernorm, x)

    def queries(self, y: Tensor, table: Table) -> tuple[Tensor, Tensor | None]:
        """`[..., h]` -> queries `[..., H, D]`, normalised and rotated, and the gate of what they find `[..., H, D]` (None where the class has none)."""
        q = project(self.attention.q_proj, y).unflatten(-1, (self.heads, -1))
        q, gate = q.chunk(2, dim=-1) if self.gated else (q, None)
        return turn(self.norm(self.attention.q_norm, q), table), gate

    def keys_values(self, y: Tensor, table: Table) -> tuple[Tensor, Tensor]:
        """`[..., h]` -> keys (normalised, rotated) and values, each `[..., Hkv, D]`."""
        k, v = (project(p, y).unflatten(-1, (self.kv_heads, self.head_dim)) for p in (self.attention.k_proj, self.attention.v_proj))
        return turn(self.norm(self.attention.k_norm, k), table), v

    def leave(self, x: Tensor, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """Residual `[..., h]`, attended values and their gate `[..., H, D]` -> `[..., h]`."""
        mixed = mixed if gate is None else mixed * gate.sigmoid()
        x = x + project(self.attention.o_proj, mixed.flatten(-2))
        return x + self.mlp(self.norm(self.module.post_attention_layernorm, x))

    def mlp(self, y: Tensor) -> Tensor:
        """The class's MLP or block of experts, `[..., h]` -> `[..., h]`."""
        own = self.module.mlp
        if not hasattr(own, "gate_proj"):
            found = own(y.reshape(1, -1, y.shape[-1]))
            return (found[0] if isinstance(found, tuple) else found).view_as(y)
        return linear(own.act_fn(linear(y, own.gate_proj.weight)) * linear(y, own.up_proj.weight), own.down_proj.weight)


def make_layer_config(layer: dict[str, Any]) -> Any:
    """Transformers' configuration from its JSON. Experts run by the class's own loop: it has gradients in every precision."""
    values = {k: v for k, v in layer.items() if k != "model_type"}
    config = AutoConfig.for_model(layer["model_type"], **values)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def make_layer(layer: dict[str, Any]) -> tuple[Any, type[nn.Module], float]:
    """A decoder layer as its class makes it, the class of its norms, and what these add to their weight.

    Raises:
        CheckpointError: a model type that is not in `FAMILIES`, or positions that depend on the length of the text.
    """
    check_layer(layer)
    family = FAMILIES[layer["model_type"]]
    classes: Any = _classes(family)
    module = getattr(classes, f"{family.prefix}DecoderLayer")(make_layer_config(layer), 0)
    return module, getattr(classes, f"{family.prefix}RMSNorm"), family.norm_offset


def check_layer(layer: Mapping[str, Any]) -> None:
    """Refuse a layer that cannot be made; see `make_layer`."""
    kind = layer.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(f"no MTP head is known for targets of model type {kind!r}; known are {', '.join(FAMILIES)}", mend="set drafter.algorithm=dspark")
    rope = rope_kind(layer.get("rope_parameters"))
    if rope not in ROPE_KINDS:
        raise CheckpointError(f"an MTP head cannot have RoPE of kind {rope!r}", mend=f"known kinds: {', '.join(ROPE_KINDS)}")


def project(module: Any, x: Tensor) -> Tensor:
    """`nn.Linear` through the fast product."""
    out = linear(x, module.weight)
    return out if module.bias is None else out + module.bias


def turn(x: Tensor, table: Table) -> Tensor:
    """Rotate the first R of D components of each head by a table of `[..., 1, R/2]`."""
    width = 2 * table[0].shape[-1]
    return rotate(x, table) if width == x.shape[-1] else torch.cat([rotate(x[..., :width], table), x[..., width:]], dim=-1)


def _eps(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _classes(family: Family) -> Any:
    return importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
