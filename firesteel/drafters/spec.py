"""DraftSpec: everything that the rest of Firesteel must know of a draft algorithm, in one object.

Training, calibration, packaging and evaluation go through it alone, so a new algorithm is one module and one `register` call.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.keys import Key
from firesteel.drafters.layer_json import LayerFields
from firesteel.drafters.rows import DraftSession
from firesteel.errors import RecipeError


def _nothing(settings: recipes.Drafter) -> dict[str, Any]:
    return {}


def _no_limits(config: DraftConfig) -> list[str]:
    return []


def _fine(config: DraftConfig) -> None:
    return None


def _served(config: DraftConfig) -> str | None:
    return None


def _either_runner(config: DraftConfig) -> bool:
    return False


def _as_it_is(config: DraftConfig, layer: Mapping[str, Any], num_layers: int) -> DraftConfig:
    return config


def _anything(settings: recipes.Drafter, layer: Mapping[str, Any], native: Callable[[], Mapping[str, Tensor]]) -> None:
    return None


def _none(config: DraftConfig) -> float | None:
    return None


@dataclass(frozen=True)
class Native:
    """A config.json that is a server's own, for those drafters of an algorithm that the speculators format cannot describe.

    Attributes:
        model_type: `model_type` of the file, which other files do not have at the top.
        covers: whether a config is written this way.
        schema: the file, validated strictly.
        to_json: called with a config and `dtype` (by name), `speculative_tokens` and `target_layers`; the whole file.
        from_json: the file (validated) and its name -> all values of `DraftConfig`.
    """

    model_type: str
    covers: Callable[[DraftConfig], bool]
    schema: type[BaseModel]
    to_json: Callable[..., dict[str, Any]]
    from_json: Callable[[Any, str], dict[str, Any]]


@dataclass(frozen=True)
class DraftSpec:
    """One algorithm.

    Attributes:
        name: as in `drafter.algorithm`, and in the checkpoint's `speculators_model_type`.
        title: how people write it.
        architecture: name in the checkpoint's `architectures`.
        build: makes the trainable module (see `rows.Drafter`), freshly initialised.
        session: makes the decoding session; called as `BlockSession` is.
        keys: the trained tensors of a checkpoint.
        schema: what config.json holds of this algorithm beside the common frame, validated strictly.
        to_json: a config -> those fields.
        from_json: those fields (validated), `transformer_layer_config` and the file's name -> values of `DraftConfig`.
        options: the recipe -> values of `DraftConfig` that only this algorithm has.
        check: refuses a config whose values contradict the algorithm (CheckpointError).
        sample_from_anchor: what an empty `drafter.sample_from_anchor` means.
        anchor_choice: whether the recipe may say otherwise.
        heads: whether it has Markov and confidence heads at all.
        causal: whether slots see only earlier slots; None leaves it to the recipe.
        masks: whether it needs a mask token.
        reduced_vocab: whether a reduced draft vocabulary is possible.
        default_draft_vocab: size of the draft vocabulary where the recipe leaves it open and the target's is larger; None: the target's whole one.
        method: vLLM's name of it in `--speculative-config`.
        serving: more of that config.
        limits: what a user must know before serving, a sentence each.
        unserved: why vLLM cannot serve this drafter, or None.
        second_runner: whether vLLM serves it with its V2 model runner only, which its CPU build has not.
        native: another config.json for some of its drafters.
        adapt: (config, the target's text configuration, its number of layers) -> the config, for drafters made of the target's own parts.
        fits: (recipe, the target's text configuration, reads the tensors of its files below `stitch`): refuses, before anything is spent, what
            no drafter can be made for (RecipeError).
        captures: number of layers -> layers that must be captured, and what `target.layer_ids=auto` means; None leaves it to the target.
        start: (new module, recipe, weight of the target's final norm, tensors of the target's files below `stitch`) fills what begins as the
            target's own, and says so.
        decay: that of exponential position weights; None leaves it to `loss.decay`.
        starts_from: algorithms, beside its own, whose checkpoints it may begin with: those whose module is a part of its module.
        shares_context: whether several ranks can train it on parts of one batch (`Batch.share`).
        stitch: prefix of its tensors in the target's own files, where servers load it from; empty for drafters in a folder of their own.
    """

    name: str
    title: str
    architecture: str
    build: Callable[[DraftConfig], nn.Module]
    session: Callable[..., DraftSession]
    keys: Callable[[DraftConfig], dict[str, Key]]
    schema: type[BaseModel]
    to_json: Callable[[DraftConfig], dict[str, Any]]
    from_json: Callable[[Any, LayerFields, str], dict[str, Any]]
    options: Callable[[recipes.Drafter], dict[str, Any]] = _nothing
    check: Callable[[DraftConfig], None] = _fine
    sample_from_anchor: bool = True
    anchor_choice: bool = False
    heads: bool = False
    causal: bool | None = None
    masks: bool = True
    reduced_vocab: bool = True
    default_draft_vocab: int | None = None
    method: str = ""
    serving: Mapping[str, Any] = field(default_factory=lambda: {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"})
    limits: Callable[[DraftConfig], list[str]] = _no_limits
    unserved: Callable[[DraftConfig], str | None] = _served
    second_runner: Callable[[DraftConfig], bool] = _either_runner
    native: Native | None = None
    adapt: Callable[[DraftConfig, Mapping[str, Any], int], DraftConfig] = _as_it_is
    fits: Callable[[recipes.Drafter, Mapping[str, Any], Callable[[], Mapping[str, Tensor]]], None] = _anything
    captures: Callable[[int], tuple[int, ...]] | None = None
    start: Callable[[nn.Module, recipes.Drafter, Tensor, Mapping[str, Tensor]], str] | None = None
    decay: Callable[[DraftConfig], float | None] = _none
    starts_from: tuple[str, ...] = ()
    shares_context: bool = False
    stitch: str = ""


_specs: dict[str, DraftSpec] = {}


def register(spec: DraftSpec) -> None:
    """Add an algorithm, or replace the one of its name."""
    _specs[spec.name] = spec


def names() -> list[str]:
    """Registered algorithms, sorted."""
    return sorted(_specs)


def native_format(model_type: object) -> Native | None:
    """The layout of files with this `model_type` at the top, or None."""
    return next((spec.native for spec in _specs.values() if spec.native is not None and spec.native.model_type == model_type), None)


def get_spec(name: str, setting: str = "drafter.algorithm") -> DraftSpec:
    """The algorithm of this name; `setting` is where it was named.

    Raises:
        RecipeError: there is none; names the nearest.
    """
    if name not in _specs:
        near = difflib.get_close_matches(name, _specs, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names())}"
        raise RecipeError(f"{setting}={name} is not known", mend=hint)
    return _specs[name]
