"""Sizes of a recipe's target and drafter for the planner: from config.json or public figures, and a drafter that is built without memory."""

from __future__ import annotations

from pathlib import Path

import torch

from firesteel.cluster.shapes import DrafterShape, TargetShape, read_target, text_config
from firesteel.drafters.build import TargetFacts, make_config
from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.recipe import Recipe
from firesteel.stages.line import pick_layer_ids
from firesteel.stages.warm import warm_described

# Which parameters meet context tokens: these alone, and keys and values, which slots have as well.
_CONTEXT = ("fc.", "context_proj.")
_SHARED = (".k_proj.", ".v_proj.", ".kv_a_proj_with_mqa.", ".kv_b_proj.")
_TABLES = ("markov_head.", "candidate_selector.predecessor", "candidate_selector.successor", "embed_tokens.", "lm_head.")


def target_shape(recipe: Recipe) -> TargetShape:
    """The recipe's target in numbers; never its weights.

    Raises:
        TargetError: there is no config.json, and no public figures of it are known.
    """
    return read_target(recipe.target.model, recipe.target.dtype)


def draft_config(recipe: Recipe, target: TargetShape) -> DraftConfig:
    """What the recipe's drafter would be for this target.

    Raises:
        RecipeError: settings contradict each other or the target.
    """
    facts = TargetFacts(
        hidden_size=target.hidden,
        intermediate_size=target.intermediate,
        num_heads=target.heads,
        num_kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=target.max_positions,
        hidden_act="silu",
        num_layers=target.layers,
    )
    mask = 0 if recipe.drafter.mask_token_id is None else recipe.drafter.mask_token_id
    # A checkpoint to start from decides the draft vocabulary; a plan may be made where it does not lie.
    source = warm_described(recipe.drafter) if Path(recipe.drafter.init).is_dir() else None
    config = make_config(recipe.drafter, facts, pick_layer_ids(recipe, target.layers), mask, source)
    return get_spec(config.algorithm).adapt(config, text_config(recipe.target.model), target.layers)


def drafter_shape(recipe: Recipe, target: TargetShape) -> DrafterShape:
    """The recipe's drafter in numbers, counted on a module without memory.

    Chains of an algorithm that drafts step by step count as blocks: a slot is a step.
    """
    config = draft_config(recipe, target)
    with torch.device("meta"):
        drafter = get_spec(config.algorithm).build(config)
    slot = shared = context = trained = 0
    for name, parameter in drafter.named_parameters():
        trained += parameter.numel()
        if name.startswith(_TABLES) or parameter.ndim < 2:
            continue
        if name.startswith(_CONTEXT):
            context += parameter.numel()
        elif any(part in name for part in _SHARED):
            shared += parameter.numel()
        else:
            slot += parameter.numel()
    slides = all(kind != FULL for kind in config.layer_types)
    return DrafterShape(
        slot=slot,
        shared=shared,
        context=context,
        vocab_rank=config.markov_rank,
        trained=trained,
        vocab=config.draft_vocab_size,
        hidden=config.hidden_size,
        layers=config.num_layers,
        attention_width=config.num_heads * config.head_dim,
        window=config.sliding_window if slides else None,
        block=config.block_size,
        captured=len(config.layer_ids),
    )
