"""Key tables: which tensors a checkpoint of an algorithm holds, with shapes and kinds.

The drafter's parameters carry the checkpoint's own names, so the same table speaks of a state dict and of a file.
Source: what vLLM 0.32 loads and speculators 0.9.0 writes for `dspark` and `dflash`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from firesteel.drafters.config import DraftConfig
from firesteel.errors import CheckpointError

ALGORITHMS = ("dflash", "dspark")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
HEAD, D2T, T2D, EMBED = "lm_head.weight", "d2t", "t2d", "embed_tokens.weight"

Kind = Literal["weight", "float32", "index", "mask"]


@dataclass(frozen=True)
class Key:
    """One tensor: its shape and its kind (`weight` takes the checkpoint's precision, the others have one of their own)."""

    shape: tuple[int, ...]
    kind: Kind = "weight"

    def dtype(self, weights: torch.dtype) -> torch.dtype:
        """The dtype that the tensor has in a checkpoint whose weights are `weights`."""
        return {"weight": weights, "float32": torch.float32, "index": torch.int64, "mask": torch.bool}[self.kind]


def drafter_keys(config: DraftConfig) -> dict[str, Key]:
    """The trained tensors: the drafter's state dict.

    Raises:
        CheckpointError: the algorithm is unknown, or the heads do not belong to it.
    """
    check_algorithm(config)
    h, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    keys = {"fc.weight": Key((h, len(config.layer_ids) * config.target_hidden_size)), "hidden_norm.weight": Key((h,)), "norm.weight": Key((h,))}
    for i in range(config.num_layers):
        layer = {
            "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
            "mlp.gate_proj.weight": (config.intermediate_size, h),
            "mlp.up_proj.weight": (config.intermediate_size, h),
            "mlp.down_proj.weight": (h, config.intermediate_size),
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
        }
        keys |= {f"layers.{i}.{name}": Key(shape) for name, shape in layer.items()}
    return keys | _head_keys(config)


def vocab_keys(config: DraftConfig) -> dict[str, Key]:
    """What a reduced vocabulary adds to the file: its rows of the target's LM head and both tables. Empty for a full vocabulary."""
    if not config.reduced_vocab:
        return {}
    small, large = config.draft_vocab_size, config.vocab_size
    return {HEAD: Key((small, config.hidden_size)), D2T: Key((small,), "index"), T2D: Key((large,), "mask")}


def sees_markov(config: DraftConfig) -> bool:
    """Whether the confidence head reads the Markov embedding of the predecessor; without a Markov head there is none to read."""
    return config.confidence_with_markov and config.markov_rank > 0


def check_algorithm(config: DraftConfig) -> None:
    """Refuse heads that contradict the algorithm or each other.

    Raises:
        CheckpointError: names the fields.
    """
    if config.algorithm not in ALGORITHMS:
        raise CheckpointError(f"algorithm {config.algorithm!r} is unknown; known are {', '.join(ALGORITHMS)}", mend="set drafter.algorithm")
    if config.algorithm == "dflash" and (config.markov_rank or config.confidence_head):
        raise CheckpointError(
            f"a dflash drafter has no heads, but markov_rank={config.markov_rank} and confidence_head={config.confidence_head}",
            mend="set drafter.algorithm=dspark, or markov_rank=0 and confidence_head=false",
        )
    if config.markov_rank and config.markov_head not in MARKOV_HEADS:
        raise CheckpointError(f"markov_head {config.markov_head!r} is unknown; known are {', '.join(MARKOV_HEADS)}", mend="set drafter.markov_head")


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Key], *, what: str) -> None:
    """Names and shapes must be exactly those of the table.

    Args:
        what: where the tensors come from; begins the error.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape.
    """
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"holds {_some(unknown)}, which the configuration does not know"] * bool(unknown)
        raise CheckpointError(f"{what} {' and '.join(parts)}", mend="weights and configuration come from different drafters, or a conversion dropped something")
    for name, key in wanted.items():
        if tuple(found[name].shape) != key.shape:
            raise CheckpointError(f"{what}: {name} has shape {list(found[name].shape)}, the configuration gives {list(key.shape)}")


def _head_keys(config: DraftConfig) -> dict[str, Key]:
    h, r, keys = config.hidden_size, config.markov_rank, {}
    if r:
        # W1 is read with target ids (the predecessor), W2 emits draft ids.
        keys["markov_head.markov_w1.weight"] = Key((config.vocab_size, r))
        keys["markov_head.markov_w2.weight"] = Key((config.draft_vocab_size, r))
        if config.markov_head == "gated":
            keys |= {"markov_head.gate_proj.weight": Key((r, h + r)), "markov_head.gate_proj.bias": Key((r,))}
        elif config.markov_head == "rnn":
            keys |= {"markov_head.joint_proj.weight": Key((3 * r, 2 * r + h)), "markov_head.joint_proj.bias": Key((3 * r,))}
    if config.confidence_head:
        # One row of full precision: it costs nothing, and its sigmoid is what calibration sharpens.
        width = h + r if sees_markov(config) else h
        keys |= {"confidence_head.proj.weight": Key((1, width), "float32"), "confidence_head.proj.bias": Key((1,), "float32")}
    return keys


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
