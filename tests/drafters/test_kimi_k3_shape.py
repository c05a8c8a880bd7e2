"""The recipe `kimi-k3` is the published drafter of Kimi-K3, to the parameter; nothing of it is allocated here."""

from __future__ import annotations

import math

import pytest
import torch

from firesteel.drafters.build import TargetFacts, make_config
from firesteel.drafters.config import SLIDING, DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.hidden.codec import state_bytes
from firesteel.hidden.stores import predict_bytes
from firesteel.package.keys import drafter_keys
from firesteel.recipe import load_recipe

# Kimi-K3, as far as a drafter asks. What the recipe states itself (heads, MLP) is given another value here.
K3 = TargetFacts(
    hidden_size=7168,
    intermediate_size=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=163840,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    rope_scaling=None,
    max_position_embeddings=1048576,
    hidden_act="silu",
    num_layers=93,
)
TABLE = 163840 * 7168  # of the embedding, and of the LM head


def k3(*overrides: str) -> DraftConfig:
    recipe = load_recipe("kimi-k3", overrides)
    assert isinstance(recipe.target.layer_ids, list)
    return make_config(recipe.drafter, K3, recipe.target.layer_ids, recipe.drafter.mask_token_id)


def test_the_published_number_of_parameters() -> None:
    config = k3()
    with torch.device("meta"):
        drafter = get_spec("dspark").build(config)
    parts: dict[str, int] = {}
    for name, parameter in drafter.named_parameters():
        assert parameter.is_meta
        part = name.split(".")[0]
        parts[part] = parts.get(part, 0) + parameter.numel()
    layer = 2 * 7168 * 96 * 64 + 2 * 7168 * 16 * 64 + 3 * 7168 * 14336 + 2 * 7168 + 2 * 64
    assert parts == {
        "fc": 5 * 7168 * 7168,
        "hidden_norm": 7168,
        "layers": 5 * layer,
        "norm": 7168,
        "markov_head": 2 * 163840 * 256,
        "confidence_head": 7168 + 256 + 1,
    }
    trained = sum(parts.values())
    assert trained == 2_396_090_241
    # The published figure counts the target's embedding and LM head, which training does not touch and our file does not repeat.
    assert trained + 2 * TABLE == 4_744_900_481
    assert sum(math.prod(key.shape) for key in drafter_keys(config).values()) == trained


def test_the_published_shape() -> None:
    config = k3()
    assert config.layer_types == (SLIDING,) * 5
    assert (config.sliding_window, config.block_size, config.num_drafts, config.mask_token_id) == (2048, 8, 8, 163837)
    assert config.layer_ids == (24, 48, 72, 88, 92)
    assert not config.reduced_vocab


@pytest.mark.parametrize("causal", [False, True])
def test_sliding_layers_of_either_causality_say_so(causal: bool) -> None:
    """vLLM takes sliding layers for causal where a checkpoint is silent."""
    config = k3(f"drafter.causal={causal}")
    written = get_spec("dspark").to_json(config)
    assert written["transformer_layer_config"]["is_causal"] is causal
    assert written["sliding_window_non_causal"] is not causal
    with torch.device("meta"):
        get_spec("dspark").build(config)


def test_hidden_states_of_one_token() -> None:
    assert state_bytes(5 + 1, 7168, "bf16") == 86_016
    # A supervised token costs little more: its id, mask byte, position and normaliser, and the header of its document.
    assert round(predict_bytes(8192, 8192, 5, 7168, "bf16") / 1e6) == 705
