"""Checkpoints of EAGLE-3 and P-EAGLE: tensors and config.json fields, as vLLM 0.32 loads and speculators 0.9.0 writes them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from firesteel import recipe as recipes
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.keys import Key, layer_keys
from firesteel.drafters.layer_json import LayerFields, ReadStrictly


class EagleFields(ReadStrictly):
    """Own fields. `norm_before_residual` must be there: absent, vLLM takes it for true, speculators for false."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] = Field(min_length=1)
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class PEagleFields(EagleFields):
    """Own fields of P-EAGLE."""

    mask_token_id: int


def eagle3_options(settings: recipes.Drafter) -> dict[str, Any]:
    """The recipe's `drafter.eagle` as a config holds it."""
    return _options(settings.eagle, residual=True)


def peagle_options(settings: recipes.Drafter) -> dict[str, Any]:
    """The same with what training drops."""
    return _options(settings.eagle, residual=False) | {"drop_ratio": settings.eagle.drop_ratio, "drop_floor": settings.eagle.drop_floor}


def _options(own: recipes.Eagle, *, residual: bool) -> dict[str, Any]:
    return {
        "layer_style": own.layer_style,
        "norm_before_residual": residual if own.norm_before_residual is None else own.norm_before_residual,
        "norm_before_fc": own.norm_before_fc,
        "fc_norm": own.fc_norm,
        "norm_output": own.norm_output,
    }


def eagle_keys(config: DraftConfig) -> dict[str, Key]:
    """The drafter's state dict."""
    h, target, extra = config.hidden_size, config.target_hidden_size, config.extra
    keys = {"fc.weight": Key((h, len(config.layer_ids) * target)), "norm.weight": Key((h,)), "layers.0.hidden_norm.weight": Key((h,))}
    if extra["norm_before_fc"]:
        keys["input_norm.weight"] = Key((len(config.layer_ids) * target,))
    if extra["fc_norm"]:
        keys |= {f"fc_norm.{i}.weight": Key((target,)) for i in range(len(config.layer_ids))}
    for i in range(config.num_layers):
        keys |= layer_keys(config, f"layers.{i}.", attention_width=2 * h if i == 0 else None, qk_norm=extra["layer_style"] == "qwen3")
    return keys


def peagle_keys(config: DraftConfig) -> dict[str, Key]:
    """The same with the state that stands in for unknown features."""
    return eagle_keys(config) | {"mask_hidden": Key((1, 1, len(config.layer_ids) * config.target_hidden_size))}


def eagle_to_json(config: DraftConfig) -> dict[str, Any]:
    """Own fields."""
    flags = {name: config.extra[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    return {
        "transformer_layer_config": {"model_type": config.extra["layer_style"]},
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        "embed_requires_grad": False,
        **flags,
    }


def peagle_to_json(config: DraftConfig) -> dict[str, Any]:
    """Own fields of P-EAGLE."""
    return eagle_to_json(config) | {"mask_token_id": config.mask_token_id}


def eagle_from_json(own: EagleFields, layers: LayerFields, where: str) -> dict[str, Any]:
    """Values of `DraftConfig` from own fields. The number of steps is the proposal's `speculative_tokens`, filled in by the reader of the frame."""
    return {
        "layer_ids": own.eagle_aux_hidden_state_layer_ids,
        "mask_token_id": None,
        "sample_from_anchor": True,
        "causal": True,
        "extra": {
            "layer_style": layers.model_type,
            "norm_before_residual": own.norm_before_residual,
            "norm_before_fc": own.norm_before_fc,
            "fc_norm": own.fc_norm,
            "norm_output": own.norm_output,
        },
    }


def peagle_from_json(own: PEagleFields, layers: LayerFields, where: str) -> dict[str, Any]:
    """Values of `DraftConfig` from own fields."""
    return eagle_from_json(own, layers, where) | {"mask_token_id": own.mask_token_id}


def peagle_unserved(config: DraftConfig) -> str | None:
    """Why vLLM cannot serve a P-EAGLE, or None."""
    return "vLLM 0.32 does not read the norms before `fc` of a P-EAGLE (drafter.eagle.fc_norm), and so does not load it." if config.extra["fc_norm"] else None


def peagle_limits(config: DraftConfig) -> list[str]:
    """What engines do not serve of a P-EAGLE."""
    reason = peagle_unserved(config)
    runner = "vLLM 0.32 serves it with its V1 model runner only, which it then takes by itself and which knows no block verification."
    return [runner, *([] if reason is None else [f"{reason} Firesteel's own engine decodes it."])]
