"""Which drafters a recipe asks for, what each is (settings, target and a checkpoint to start from make a `DraftConfig`), and how it starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from firesteel import recipe as recipes
from firesteel.batches.batch import Batch
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.build import TargetFacts, make_config
from firesteel.drafters.carry import carry_state
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.init import init_from_target
from firesteel.drafters.registry import get_spec
from firesteel.drafters.warm import check_weights, warm_config
from firesteel.errors import FiresteelError, RecipeError
from firesteel.hidden.window import watermarks
from firesteel.package.keys import check_tensors, drafter_keys
from firesteel.package.load import LoadedDraft
from firesteel.stages.checkpoints import check_checkpoints
from firesteel.stages.extra import read_extra
from firesteel.stages.line import Line
from firesteel.stages.warm import warm_source
from firesteel.target.mask import pick_mask_token
from firesteel.target.native import read_native
from firesteel.target.spec import TargetSpec


def algorithms(line: Line) -> list[str]:
    """The recipe's drafter first, then those to compare it with, each once.

    `evaluate.drafters` may have more than `evaluate.compare` (so a recipe's list can be shortened), but no name that nothing answers to.

    Raises:
        RecipeError: an algorithm that is not known.
    """
    recipe = line.recipe
    for setting, names in (("evaluate.compare", recipe.evaluate.compare), ("evaluate.drafters", recipe.evaluate.drafters)):
        for name in names:
            get_spec(name, setting)
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
    config = make_config(settings, target_facts(spec), line.layer_ids, mask, None if warm is None else warm.config)
    config = get_spec(algorithm).adapt(config, line.target.text_config, spec.num_layers)
    return (config if warm is None else warm_config(config, warm.config, settings.init)), warm


def preflight(line: Line) -> dict[str, int]:
    """Build and start every drafter without memory, read `evaluate.extra` and `evaluate.checkpoints`: what cannot be is refused before hours of work.

    Returns:
        trainable parameters by algorithm.

    Raises:
        FiresteelError: of the kind that the stage would meet that needs the setting; of a compared drafter it says so.
    """
    recipe, counts = line.recipe, {}
    for extra in recipe.evaluate.extra:
        read_extra(extra)
    check_checkpoints(line)
    if recipe.hidden.store == "stream":
        watermarks(recipe.hidden.feed, recipe.train.accumulate * recipe.train.batch_tokens)
    for name in algorithms(line):
        try:
            counts[name] = _rehearse(line, name)
        except FiresteelError as e:
            if name == line.recipe.drafter.algorithm:
                raise
            mend = f"{e.mend}; for this drafter alone: in evaluate.drafters.{name}" if e.mend else None
            raise type(e)(f"evaluate.compare has {name}: {e.message}", mend=mend) from None
    return counts


def _rehearse(line: Line, algorithm: str) -> int:
    """Parameters of a drafter that can be built, started, exported and measured as the recipe says."""
    spec, settings = get_spec(algorithm), line.recipe.drafter_of(algorithm)
    if algorithm != line.recipe.drafter.algorithm:  # for the headline drafter the target is looked at as soon as it is loaded
        # `init: target` of a recipe that compares drafters is for those whose layers are like a target's; others have a start of their own.
        own = settings.model_copy(update={"init": "random"}) if settings.init == "target" and spec.start is not None else settings
        spec.fits(own, line.target.text_config, lambda: read_native(line.recipe.target, spec.stitch))
    config, warm = configure(line, algorithm)
    if algorithm == line.recipe.drafter.algorithm:
        _check_lengths(line.recipe, config)
    with torch.device("meta"):
        drafter = spec.build(config)
    check_tensors(drafter.state_dict(), drafter_keys(config), what=f"drafter.algorithm={algorithm}: the module")
    if settings.init == "target":
        start_from_target(line, drafter, config)  # without `drafter.carry`: that wants states, and fits whatever these fit
    if warm is not None:
        check_weights(drafter, warm.tensors, settings.init)
    return sum(p.numel() for p in drafter.parameters())


def _check_lengths(recipe: recipes.Recipe, config: DraftConfig) -> None:
    served = recipe.package.speculative_tokens
    wanted = {"package.speculative_tokens": [] if served is None else [served], "evaluate.draft_lengths": recipe.evaluate.draft_lengths or []}
    for name, lengths in wanted.items():
        wrong = [n for n in lengths if not 1 <= n <= config.num_drafts]
        if wrong:
            raise RecipeError(
                f"{name} has {wrong[0]}, but this drafter drafts 1 to {config.num_drafts} tokens a round",
                mend=f"leave out {name}, or set drafter.block_size higher",
            )


def start_from_target(line: Line, drafter: nn.Module, config: DraftConfig, samples: Sequence[Batch] = ()) -> None:
    """With `drafter.init=target`: copy the target's last layers into a new drafter. Algorithms that start otherwise are left as they are.

    Args:
        samples: batches to learn from what captured states look like; with `drafter.carry` the first layer then hands the newest over.

    Raises:
        RecipeError: the target's layers do not fit the drafter's.
    """
    if get_spec(config.algorithm).start is not None:
        return
    first = first_copied_layer(line.target.spec.num_layers, config)
    feature = config.layer_ids.index(first) if first in config.layer_ids else len(config.layer_ids) - 1
    init_from_target(drafter, line.target.layer_weights(first, config.num_layers), line.target.norm_weight, feature=feature)
    if line.recipe.drafter_of(config.algorithm).carry and isinstance(drafter, BlockDrafter) and samples:
        right = carry_state(drafter, samples, line.target.head.embed, feature=feature)
        line.screen.say(f"{config.algorithm}: starts from the target's layers; the first hands the newest state over ({right:.1%} of the keys right)")


def first_copied_layer(target_layers: int, config: DraftConfig) -> int:
    """The target's layer that the drafter's first one starts from: the last captured one that leaves enough layers above it."""
    return max(0, min(max(config.layer_ids), target_layers - config.num_layers))


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
