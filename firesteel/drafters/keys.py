"""Key: one tensor of a checkpoint. Each algorithm has a table of them; parameters carry the checkpoint's own names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from firesteel.drafters.config import DraftConfig

Kind = Literal["weight", "float32", "index", "mask"]


@dataclass(frozen=True)
class Key:
    """One tensor: its shape and its kind (`weight` takes the checkpoint's precision, the others have one of their own)."""

    shape: tuple[int, ...]
    kind: Kind = "weight"

    def dtype(self, weights: torch.dtype) -> torch.dtype:
        """The dtype that the tensor has in a checkpoint whose weights are `weights`."""
        return {"weight": weights, "float32": torch.float32, "index": torch.int64, "mask": torch.bool}[self.kind]


def layer_keys(config: DraftConfig, prefix: str, *, attention_width: int | None = None, qk_norm: bool = True) -> dict[str, Key]:
    """Tensors of one decoder layer, Qwen3-style, or Llama-style without q/k norms.

    Args:
        prefix: such as `layers.0.`.
        attention_width: what q, k and v projections read; None is the hidden size.
    """
    h, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = attention_width or h
    shapes = {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (h, q),
        "mlp.gate_proj.weight": (config.intermediate_size, h),
        "mlp.up_proj.weight": (config.intermediate_size, h),
        "mlp.down_proj.weight": (h, config.intermediate_size),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return {f"{prefix}{name}": Key(shape) for name, shape in shapes.items()}
