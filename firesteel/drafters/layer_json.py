"""`transformer_layer_config` of a checkpoint: the drafter's decoder layers, written and read strictly.

Where readers of the format disagree about an absent or doubtful field, writing states it and reading refuses it:
a drafter served by another rule than it was trained by loses its acceptance without an error.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.drafters.rope import ROPE_KINDS
from firesteel.errors import CheckpointError

# RoPE of a part of each head, or of pictures: beside a scaling such a field changes what other readers compute.
_PARTIAL_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


class ReadStrictly(BaseModel):
    """Fields that shape the drafter; what other tools add beside them is not looked at."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class LayerFields(ReadStrictly):
    """The layers' fields. Those with one allowed value would change the network if they had another."""

    model_type: Literal["qwen3", "llama"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: Literal[1] | None = None
    use_sliding_window: bool | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    is_neox_style: Literal[True] = True
    logit_scale: Literal[1] | None = None
    quantization_config: None = None


def layers_to_json(config: DraftConfig, dtype: str, model_type: str = "qwen3") -> dict[str, Any]:
    """The fields of a config's layers; `dtype` by name.

    Raises:
        CheckpointError: a scaling of RoPE that the file cannot express.
    """
    if config.rope_scaling is not None and config.rope_scaling.get("rope_type", "default") == "default":
        raise CheckpointError(f"rope_scaling {config.rope_scaling} names no rope_type: other readers would not scale")
    slides = SLIDING in config.layer_types
    return {
        "model_type": model_type,
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
        "layer_types": list(config.layer_types),
        "use_sliding_window": slides,
        "sliding_window": window_of(config),
        "max_window_layers": 0 if slides else config.num_layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }


def layers_from_json(layers: LayerFields, where: str) -> dict[str, Any]:
    """Values of `DraftConfig` that the layers' fields give.

    Raises:
        CheckpointError: fields that contradict each other, or a RoPE or a window that Firesteel's engine would not apply.
    """
    types = read_layer_types(layers, where)
    window = _window(layers, types, where)
    theta, scaling = _rope(layers, where)
    return {
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_layers": layers.num_hidden_layers,
        "num_heads": layers.num_attention_heads,
        "num_kv_heads": layers.num_key_value_heads,
        "head_dim": layers.head_dim,
        "vocab_size": layers.vocab_size,
        "layer_types": types,
        "sliding_window": DraftConfig.sliding_window if window is None else window,
        "rms_norm_eps": layers.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": layers.max_position_embeddings,
        "hidden_act": layers.hidden_act,
    }


def window_of(config: DraftConfig) -> int | None:
    """The sliding window, or None where no layer slides."""
    return config.sliding_window if SLIDING in config.layer_types else None


def read_layer_types(layers: LayerFields, where: str) -> tuple[str, ...]:
    """One type per layer; all full where the file is silent."""
    types = layers.layer_types
    if types is None:
        if layers.use_sliding_window:
            raise CheckpointError(f"{where}: use_sliding_window is true, but layer_types does not say which layers slide", mend="state layer_types")
        return (FULL,) * layers.num_hidden_layers
    if len(types) != layers.num_hidden_layers:
        raise CheckpointError(f"{where}: layer_types names {len(types)} layers, num_hidden_layers is {layers.num_hidden_layers}")
    return types


def _window(layers: LayerFields, types: tuple[str, ...], where: str) -> int | None:
    """The window of the sliding layers; Qwen3's own configuration forgets it unless `use_sliding_window` is true."""
    if SLIDING not in types:
        if layers.use_sliding_window:
            raise CheckpointError(
                f"{where}: use_sliding_window is True (sliding_window {layers.sliding_window}), but layer_types has no sliding layer",
                mend="state layer_types and use_sliding_window as the drafter was trained",
            )
        return None
    if layers.sliding_window is None or (layers.model_type == "qwen3" and not layers.use_sliding_window):
        raise CheckpointError(
            f"{where}: layer_types has sliding layers, but sliding_window is {layers.sliding_window} and use_sliding_window is {layers.use_sliding_window}",
            mend="state the window and set use_sliding_window",
        )
    return layers.sliding_window


def _rope(layers: LayerFields, where: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling (None if there is none), from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    rope = dict(layers.rope_parameters or layers.rope_scaling or {})
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", layers.rope_theta)
    if not isinstance(theta, int | float) or isinstance(theta, bool):
        raise CheckpointError(f"{where}: rope_theta is {theta!r}, not a number", mend="state rope_parameters.rope_theta as the drafter was trained")
    if kind == "default" and len(rope) > 1:
        raise CheckpointError(f"{where}: rope_parameters has {', '.join(sorted(rope.keys() - {'rope_type'}))}: a drafter's positions are those of plain text")
    partial = [name for name in _PARTIAL_ROPE if name in rope]
    if kind not in ROPE_KINDS or partial:
        raise CheckpointError(
            f"{where}: RoPE of kind {kind!r}{f' with {partial[0]}' if partial else ''} is not what Firesteel's engine applies",
            mend=f"kinds: {', '.join(ROPE_KINDS)}, over whole heads",
        )
    return float(theta), None if kind == "default" else rope
