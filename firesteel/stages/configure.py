"""Which drafters a recipe asks for, and what each is: from settings, target and a checkpoint to start from, to a `DraftConfig`."""

from __future__ import annotations

import torch
from torch import nn

from firesteel import recipe as recipes
from firesteel.drafters.build import TargetFacts, make_config
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.drafters.warm import warm_config
from firesteel.package.load import LoadedDraft
from firesteel.stages.line import Line
from firesteel.stages.warm import warm_source
from firesteel.target.mask import pick_mask_token
from firesteel.target.native import read_native
from firesteel.target.spec import TargetSpec


def algorithms(line: Line) -> list[str]:
    """The recipe's drafter first, then those to compare it with, each once.

    Raises:
        RecipeError: an algorithm that is not known.
    """
    recipe = line.recipe
    for name in recipe.evaluate.compare:
        get_spec(name, "evaluate.compare")
    return list(dict.fromkeys([recipe.drafter.algorithm, *recipe.evaluate.compare]))


def configure(line: Line, algorithm: str) -> tuple[DraftConfig, LoadedDraft | None]:
    """The config of one of the recipe's drafters, and the checkpoint that it starts from, if any.

    Raises:
        RecipeError, CheckpointError: settings, target and checkpoint contradict each other.
    """
    settings, spec = line.recipe.drafter_of(algorithm), line.target.spec
    warm = warm_source(settings)
    mask = settings.mask_token_id if warm is None or settings.mask_token_id is not None else warm.config.mask_token_id
    if mask is None and get_spec(algorithm).masks:
        mask = pick_mask_token(line.target.tokenizer, spec.vocab_size, spec.eos_ids)
    config = make_config(settings, target_facts(spec), line.layer_ids, mask)
    config = get_spec(algorithm).adapt(config, line.target.text_config, spec.num_layers)
    return (config if warm is None else warm_config(config, warm.config, settings.init)), warm


def preflight(line: Line) -> dict[str, int]:
    """Build every drafter without memory, so that one that cannot be is refused before hours of answers and states.

    Returns:
        trainable parameters by algorithm.
    """
    counts = {}
    for name in algorithms(line):
        config, _ = configure(line, name)
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in get_spec(name).build(config).parameters())
    return counts


def begin_as_target(line: Line, drafter: nn.Module, settings: recipes.Drafter) -> None:
    """Fill what an algorithm takes over from the target, and say so."""
    spec = get_spec(settings.algorithm)
    if spec.start is not None:
        said = spec.start(drafter, settings, line.target.norm_weight, read_native(line.recipe.target, spec.stitch))
        line.screen.say(f"{settings.algorithm}: {said}")


def target_facts(spec: TargetSpec) -> TargetFacts:
    """What a drafter takes from its target; the two rooms do not know each other."""
    return TargetFacts(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
        rope_scaling=spec.rope_scaling,
        max_position_embeddings=spec.max_position_embeddings,
        hidden_act=spec.hidden_act,
        num_layers=spec.num_layers,
    )
