"""Checkpoints of DFlash2: tensors, config.json fields and settings, as vLLM 0.32 loads and speculators 0.9.0 writes them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from firesteel import recipe as recipes
from firesteel.drafters.block_format import BlockFields, block_from_json, block_keys, block_limits, block_to_json, check_headless
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.keys import Key
from firesteel.drafters.layer_json import LayerFields
from firesteel.errors import CheckpointError, RecipeError


class DFlash2Fields(BlockFields):
    """Own fields of a dflash2 checkpoint. Unlike dflash, absent `sliding_window_non_causal` is true, for vLLM and speculators alike."""

    sliding_window_non_causal: bool = True
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


# Name in `DraftConfig.extra` and in the recipe -> name in config.json.
_NAMES = {"kernel": "conv_kernel_size", "group": "conv_group_size", "rank": "selector_rank", "top_k": "selector_top_k"}


def dflash2_options(settings: recipes.Drafter) -> dict[str, Any]:
    """The recipe's `drafter.dflash2` as a config holds it."""
    return settings.dflash2.model_dump()


def own_settings(config: DraftConfig) -> recipes.DFlash2:
    """What a config holds of `drafter.dflash2`; a checkpoint from elsewhere has no weight of the selector's loss and gets the recipe's default.

    Raises:
        CheckpointError: a value that is out of range or not known.
    """
    try:
        return recipes.DFlash2.model_validate(config.extra)
    except ValidationError as e:
        first = e.errors()[0]
        raise CheckpointError(f"dflash2.{'.'.join(map(str, first['loc']))}: {first['msg']} (got {first['input']!r})", mend="see drafter.dflash2") from None


def check_dflash2(config: DraftConfig) -> None:
    """Refuse heads of another algorithm and sizes that do not fit together.

    Raises:
        CheckpointError, RecipeError: names the fields.
    """
    check_headless(config)
    own = own_settings(config)
    if config.hidden_size % own.group:
        raise RecipeError(
            f"drafter.dflash2.group={own.group} does not divide the hidden size {config.hidden_size}",
            mend="set drafter.dflash2.group to a divisor, such as " + ", ".join(str(n) for n in (8, 16, 32, 1) if config.hidden_size % n == 0),
        )
    if own.kernel > config.block_size:
        raise RecipeError(f"drafter.dflash2.kernel={own.kernel} is longer than drafter.block_size={config.block_size}", mend="set drafter.dflash2.kernel=2")
    if own.top_k > config.vocab_size:
        raise RecipeError(f"drafter.dflash2.top_k={own.top_k} exceeds the target's vocabulary of {config.vocab_size}", mend="set drafter.dflash2.top_k lower")


def dflash2_keys(config: DraftConfig) -> dict[str, Key]:
    """The drafter's state dict: the backbone's, the convolutions' of each layer and the selector's."""
    own, h = own_settings(config), config.hidden_size
    kernels = 2 * own.kernel * (h // own.group)
    keys = block_keys(config)
    for i in range(config.num_layers):
        for part in ("attention_conv", "mlp_conv"):
            keys[f"layers.{i}.{part}.base_kernel"] = Key((2, own.kernel, h))
            keys[f"layers.{i}.{part}.kernel_projection.weight"] = Key((kernels, h))
    for name in ("predecessor_codebook", "successor_codebook"):
        keys[f"candidate_selector.{name}"] = Key((config.vocab_size, own.rank))
    keys["candidate_selector.hidden_projection.weight"] = Key((own.rank, h))
    return keys


def dflash2_to_json(config: DraftConfig) -> dict[str, Any]:
    """Own fields; the weight of the selector's loss has no place there."""
    own = own_settings(config)
    return block_to_json(config) | {theirs: getattr(own, ours) for ours, theirs in _NAMES.items()}


def dflash2_from_json(own: DFlash2Fields, layers: LayerFields, where: str) -> dict[str, Any]:
    """Values of `DraftConfig` from own fields."""
    return block_from_json(own, layers, where) | {"extra": {ours: getattr(own, theirs) for ours, theirs in _NAMES.items()}}


def dflash2_limits(config: DraftConfig) -> list[str]:
    """What engines do not serve."""
    return [*block_limits(config), "vLLM serves it with its V2 model runner only, where the architecture in config.json tells it from DFlash."]
