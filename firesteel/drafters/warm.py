"""Warm start: a new drafter takes the weights of an earlier one, and only what that lacks starts fresh.

Weights mean nothing without their conventions, so these must agree: captured layers (`fc` reads them in order), which token a slot
predicts, the mask token (its embedding is the input of every unknown slot), causality within a block, and the draft vocabulary wherever a
tensor counts by it. RoPE and the norms' epsilon are part of the weights, and no setting of the recipe, so the new drafter has the earlier
one's. Free are the block size (no tensor knows it; a slot is a position like any other, and training goes on) and the attention window
(the same weights over more or less context).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from firesteel.drafters.config import DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.errors import RecipeError

_CONVENTIONS = {
    "layer_ids": "set target.layer_ids to the checkpoint's (the stored states are captured anew)",
    "sample_from_anchor": "set drafter.sample_from_anchor to the checkpoint's: its slots predict other tokens",
    "mask_token_id": "set drafter.mask_token_id to the checkpoint's",
    "causal": "set drafter.causal to the checkpoint's",
    "hidden_size": "the drafter belongs to another target",
    "target_hidden_size": "the drafter belongs to another target",
    "vocab_size": "the drafter belongs to another target",
    "hidden_act": "the drafter has another activation",
    "num_layers": "set drafter.num_layers to the checkpoint's",
    "intermediate_size": "set drafter.intermediate_size to the checkpoint's",
    "num_heads": "set drafter.num_heads to the checkpoint's",
    "num_kv_heads": "set drafter.num_kv_heads to the checkpoint's",
    "head_dim": "set drafter.head_dim to the checkpoint's",
}


def vocabulary_tensors(config: DraftConfig) -> tuple[str, ...]:
    """Trained tensors whose first dimension counts draft tokens."""
    keys = get_spec(config.algorithm).keys
    other = keys(replace(config, vocab_size=config.vocab_size + 1, draft_vocab_size=config.draft_vocab_size + 1))
    fixed = keys(replace(config, vocab_size=config.vocab_size + 1))
    return tuple(name for name in fixed if fixed[name].shape != other[name].shape)


def warm_config(config: DraftConfig, source: DraftConfig, where: str) -> DraftConfig:
    """`config` as the weights of `source` need it; all other fields must fit.

    Args:
        where: the checkpoint; named in errors.

    Raises:
        RecipeError: an algorithm that cannot begin so, or a convention or size that differs; names both values.
    """
    known = (config.algorithm, *get_spec(config.algorithm).starts_from)
    if source.algorithm not in known:
        raise RecipeError(
            f"drafter.init={where}: a {config.algorithm} drafter cannot begin with the weights of a {source.algorithm}",
            mend=f"use a checkpoint of {' or '.join(known)}",
        )
    for name, mend in _CONVENTIONS.items():
        _same(name, getattr(config, name), getattr(source, name), where, mend)
    heads = ["markov_rank", "markov_head"] if config.markov_rank and source.markov_rank else []
    heads += ["confidence_with_markov"] if config.confidence_head and source.confidence_head else []
    for name in heads:
        _same(name, getattr(config, name), getattr(source, name), where, f"set drafter.{name} to the checkpoint's")
    found = replace(
        config,
        rope_theta=source.rope_theta,
        rope_scaling=source.rope_scaling,
        rms_norm_eps=source.rms_norm_eps,
        max_position_embeddings=max(config.max_position_embeddings, source.max_position_embeddings),
    )
    if config.algorithm == source.algorithm:
        # What config.json says of `extra` shapes the network; the rest of `extra` are wishes about training.
        to_json = get_spec(config.algorithm).to_json
        ours, theirs = to_json(found), to_json(replace(found, extra={**found.extra, **source.extra}))
        for name in ours:
            _same(name, ours[name], theirs.get(name), where, "set it in the recipe to the checkpoint's")
    return found


def check_weights(drafter: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights that have no place in a drafter, which may lie on the meta device.

    Args:
        where: the checkpoint; named in errors.

    Raises:
        RecipeError: a tensor that the drafter does not have, or another shape.
    """
    own = dict(drafter.named_parameters())
    for name, tensor in tensors.items():
        if name not in own:
            raise RecipeError(
                f"drafter.init={where}: it holds {name}, which the recipe's drafter does not have", mend="ask for the head or layer it belongs to"
            )
        if own[name].shape != tensor.shape:
            raise RecipeError(
                f"drafter.init={where}: {name} is {list(tensor.shape)} there and {list(own[name].shape)} in the drafter",
                mend="give the drafter the checkpoint's sizes (and its draft vocabulary)",
            )


@torch.no_grad()
def init_from_checkpoint(
    drafter: nn.Module, tensors: Mapping[str, Tensor], source: DraftConfig, where: str, *, source_ids: Tensor | None = None, target_ids: Tensor | None = None
) -> list[str]:
    """Copy the weights; returns the names of parameters that stay fresh.

    Args:
        drafter: freshly built from a `warm_config`.
        tensors: the checkpoint's state dict, in any precision.
        source_ids, target_ids: `[V_draft]` target id of each draft id, of the checkpoint and of the drafter; None for a full vocabulary.

    Raises:
        RecipeError: a tensor that the drafter does not have, another shape, or draft ids that mean other tokens.
    """
    check_weights(drafter, tensors, where)
    own = dict(drafter.named_parameters())
    same = (source_ids is None and target_ids is None) or (
        source_ids is not None and target_ids is not None and torch.equal(source_ids.cpu(), target_ids.cpu())
    )
    counted = [] if same else [name for name in vocabulary_tensors(source) if name in tensors]
    if counted:
        raise RecipeError(
            f"drafter.init={where}: {counted[0]} counts by draft ids, and those of the checkpoint mean other tokens than the recipe's",
            mend="use a checkpoint without it, or leave out drafter.draft_vocab_size: the drafter then has the checkpoint's vocabulary",
        )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
    return sorted(own.keys() - tensors.keys())


def _same(name: str, ours: object, theirs: object, where: str, mend: str) -> None:
    if ours != theirs:
        raise RecipeError(f"drafter.init={where}: {name} is {theirs!r} there, {ours!r} in the recipe's drafter", mend=mend)
