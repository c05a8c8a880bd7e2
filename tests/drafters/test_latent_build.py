"""Training of a drafter with latent attention, and from the recipe to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_cases import make_batch, make_tables
from latent_cases import ANCHORS, LENGTHS, TINY, YARN
from torch import Tensor
from torch.nn import functional as F

from firesteel.drafters.build import TargetFacts, make_config
from firesteel.drafters.config import FULL, SLIDING
from firesteel.drafters.latent import LatentDrafter
from firesteel.drafters.registry import get_spec
from firesteel.errors import CheckpointError, RecipeError
from firesteel.recipe import Drafter, Mla
from firesteel.training.optimizer import split_parameters


def test_a_step_lowers_the_loss_and_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    drafter = get_spec("dspark").build(TINY)
    assert isinstance(drafter, LatentDrafter)
    embed, head, _ = make_tables(TINY)
    batch = make_batch(TINY, LENGTHS, ANCHORS)
    with torch.no_grad():  # a new W2 is zero and hides W1
        drafter.markov_head.markov_w2.weight.normal_(std=0.02)

    def loss() -> Tensor:
        rows = drafter.training_rows(batch, embed, head)
        logits = torch.stack([r @ w.T for r, w in rows.pieces]).sum(0)
        assert rows.confidence_logits is not None
        kept = batch.draft_labels.flatten() >= 0
        wanted = F.cross_entropy(logits[kept], batch.draft_labels.flatten()[kept])
        return wanted + F.binary_cross_entropy_with_logits(rows.confidence_logits.flatten()[kept], torch.zeros(int(kept.sum())))

    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.05)
    before = loss()
    before.backward()
    assert [n for n, p in drafter.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)] == []
    optimizer.step()
    assert loss().item() < before.item()
    matrices, tables, rest = split_parameters(drafter)
    assert len(matrices) == 1 + 2 * 8
    assert len(tables) == 2
    assert len(matrices) + len(tables) + len(rest) == len(list(drafter.parameters()))


FACTS = TargetFacts(
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=100,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_position_embeddings=512,
    hidden_act="silu",
    num_layers=6,
)
SIZES = Mla(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6)


def test_the_recipe_gives_the_sizes() -> None:
    config = make_config(Drafter(backbone="mla", mla=SIZES), FACTS, [1, 3], 99)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (4, 4, 4, 64)
    assert config.extra == {"backbone": "mla", "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "v_head_dim": 6}
    get_spec("dspark").build(config)
    assert make_config(Drafter(), FACTS, [1], 99).extra == {}
    assert make_config(Drafter(algorithm="dflash", backbone="mla"), FACTS, [1], 99).extra == {}  # dspark's setting, as its heads are


def test_rope_of_the_target_where_servers_compute_it_alike() -> None:
    def scaling(target: dict[str, Any]) -> dict[str, Any] | None:
        return make_config(Drafter(backbone="mla", mla=SIZES), replace(FACTS, rope_scaling=target), [1], 99).rope_scaling

    assert scaling(YARN) == YARN
    llama = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    for foreign in (llama, {**YARN, "attention_factor": 1.0}, {k: v for k, v in YARN.items() if k != "mscale"}):
        assert scaling(foreign) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Drafter(backbone="mla", num_kv_heads=2), r"num_kv_heads=2.*backbone=mla"),
        (Drafter(backbone="mla", head_dim=8), r"head_dim=8[^$]*qk_rope_head_dim"),
        (Drafter(backbone="mla", init="target"), "init=target"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: Drafter, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_config(settings, FACTS, [1], 99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": (FULL, SLIDING)}, "drafter.attention=full"),
        ({"causal": True}, "leave out drafter.causal"),
        ({"sample_from_anchor": False}, "drafter.sample_from_anchor"),
        ({"draft_vocab_size": 20}, "drafter.draft_vocab_size"),
        ({"markov_rank": 0}, "drafter.markov_rank"),
        ({"markov_head": "gated"}, "drafter.markov_head=vanilla"),
        ({"mask_token_id": None}, "drafter.mask_token_id"),
        ({"num_kv_heads": 1}, "drafter.num_kv_heads"),
        ({"hidden_act": "gelu"}, "SwiGLU"),
        ({"target_hidden_size": 12}, "hidden size"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "YaRN"),
        ({"extra": {**TINY.extra, "v_head_dim": 11}}, "drafter.mla.v_head_dim"),
        ({"extra": {**TINY.extra, "q_lora_rank": None}}, "q_lora_rank is None"),
    ],
)
def test_what_this_backbone_does_not_have_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LatentDrafter(replace(TINY, **change))


def test_the_published_draft_of_kimi_k3() -> None:
    """`k3_dspark` as published (7168 wide, 5 layers, 64 heads), on the meta device: its file without the copy of the target's embedding."""
    facts = replace(FACTS, hidden_size=7168, vocab_size=163840, num_layers=93)
    settings = Drafter(backbone="mla", num_layers=5, num_heads=64, intermediate_size=14336, block_size=7)
    with torch.device("meta"):
        drafter = get_spec("dspark").build(make_config(settings, facts, [3, 24, 48, 72, 90], 163837))
    assert sum(p.numel() for p in drafter.parameters()) == 2_387_907_841
