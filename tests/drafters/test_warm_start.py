"""Warm start: weights come over where their conventions hold, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_cases import DFLASH, TINY, make_drafter, make_tables

from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.config import SLIDING, DraftConfig
from firesteel.drafters.registry import get_spec, names
from firesteel.drafters.warm import init_from_checkpoint, vocabulary_tensors, warm_config
from firesteel.errors import RecipeError

FILL_IN = replace(TINY, sample_from_anchor=False)
DFLASH2 = replace(DFLASH, algorithm="dflash2", extra={"kernel": 2, "group": 8, "rank": 6, "top_k": 4, "selector_loss": 1.0})
REDUCED = replace(TINY, draft_vocab_size=17)


def states(drafter: Any, config: DraftConfig) -> torch.Tensor:
    """What a drafter computes for one block behind seven positions."""
    embed, head, _ = make_tables(config)
    session = get_spec(config.algorithm).session(drafter.eval(), embed, head, draft_to_target=None, max_length=32)
    session.observe(torch.arange(7), torch.randn(7, 2 * 24, generator=torch.Generator().manual_seed(4)))
    return session.states(3)


def begun(config: DraftConfig, source: DraftConfig) -> tuple[Any, Any, list[str]]:
    """A new drafter, the earlier one, and what stayed fresh."""
    earlier = make_drafter(source)
    drafter = get_spec(config.algorithm).build(warm_config(config, source, "ckpt"))
    fresh = init_from_checkpoint(drafter, earlier.state_dict(), source, "ckpt")
    return drafter, earlier, fresh


@pytest.mark.parametrize("config", [FILL_IN, DFLASH2, DFLASH], ids=lambda c: c.algorithm)
def test_it_starts_where_the_dflash_stands(config: DraftConfig) -> None:
    drafter, earlier, fresh = begun(config, DFLASH)
    assert torch.allclose(states(drafter, config), states(earlier, DFLASH), atol=1e-5)
    assert {name.split(".")[0] for name in fresh} <= {"markov_head", "confidence_head", "candidate_selector", "layers"}
    assert bool(fresh) == (config.algorithm != "dflash")
    if config is FILL_IN:  # a fresh W2 is zero: the first drafts are the DFlash's
        embed, head, _ = make_tables(config)
        sessions = [
            get_spec(c.algorithm).session(d.eval(), embed, head, draft_to_target=None, max_length=32) for d, c in ((drafter, config), (earlier, DFLASH))
        ]
        for session in sessions:
            session.observe(torch.arange(7), torch.randn(7, 2 * 24, generator=torch.Generator().manual_seed(4)))
        assert sessions[0].draft(3, 3).tokens == sessions[1].draft(3, 3).tokens


def test_fine_tuning_takes_everything_whatever_its_precision() -> None:
    earlier = make_drafter(TINY).to(torch.bfloat16)
    drafter = BlockDrafter(TINY)
    assert init_from_checkpoint(drafter, earlier.state_dict(), TINY, "ckpt") == []
    assert all(torch.equal(p, earlier.state_dict()[n].float()) for n, p in drafter.state_dict().items())


def test_free_fields_and_those_of_the_weights() -> None:
    source = replace(DFLASH, rope_theta=77.0, rope_scaling={"rope_type": "linear", "factor": 2.0}, rms_norm_eps=1e-4)
    wish = replace(FILL_IN, block_size=6, layer_types=(SLIDING, SLIDING), sliding_window=9)
    found = warm_config(wish, source, "ckpt")
    assert found == replace(wish, rope_theta=77.0, rope_scaling=source.rope_scaling, rms_norm_eps=1e-4)


@pytest.mark.parametrize(
    ("config", "source", "words"),
    [
        (TINY, DFLASH, ["sample_from_anchor is False there, True", "drafter.sample_from_anchor"]),
        (replace(FILL_IN, layer_ids=(2, 3)), DFLASH, ["layer_ids is (1, 3) there, (2, 3)", "target.layer_ids"]),
        (replace(FILL_IN, mask_token_id=4), DFLASH, ["mask_token_id is 49 there, 4"]),
        (replace(FILL_IN, causal=True), DFLASH, ["causal is False there, True"]),
        (replace(FILL_IN, vocab_size=60, draft_vocab_size=60), DFLASH, ["vocab_size is 50 there, 60", "another target"]),
        (replace(FILL_IN, num_kv_heads=1), DFLASH, ["num_kv_heads is 2 there, 1", "drafter.num_kv_heads"]),
        (replace(FILL_IN, intermediate_size=48), DFLASH, ["intermediate_size"]),
        (replace(FILL_IN, num_layers=1, layer_types=("full_attention",)), DFLASH, ["num_layers is 2 there, 1"]),
        (DFLASH, FILL_IN, ["a dflash drafter cannot begin with the weights of a dspark"]),
        (DFLASH2, FILL_IN, ["dflash2 drafter cannot begin", "dflash2 or dflash"]),
        (replace(TINY, markov_head="rnn"), TINY, ["markov_head is 'vanilla' there, 'rnn'"]),
        (replace(TINY, markov_rank=8), TINY, ["markov_rank is 6 there, 8"]),
        (replace(DFLASH2, extra=DFLASH2.extra | {"top_k": 8}), DFLASH2, ["selector_top_k is 4 there, 8"]),
    ],
    ids=lambda value: "" if isinstance(value, DraftConfig) else value[0][:24],
)
def test_contradictions_are_refused(config: DraftConfig, source: DraftConfig, words: list[str]) -> None:
    with pytest.raises(RecipeError) as e:
        warm_config(config, source, "ckpt")
    for word in (*words, "drafter.init=ckpt"):
        assert word in str(e.value)


def test_wishes_about_training_may_differ() -> None:
    assert warm_config(replace(DFLASH2, extra=DFLASH2.extra | {"selector_loss": 0.5}), DFLASH2, "ckpt").extra["selector_loss"] == 0.5


def test_dropped_and_misshapen_tensors_are_refused() -> None:
    drafter = BlockDrafter(replace(TINY, confidence_head=False))
    before = {n: p.clone() for n, p in drafter.state_dict().items()}
    with pytest.raises(RecipeError, match=r"it holds confidence_head\.proj\.\w+, which the recipe's drafter does not have"):
        init_from_checkpoint(drafter, make_drafter(TINY).state_dict(), TINY, "ckpt")
    with pytest.raises(RecipeError, match=r"norm\.weight is \[3\] there and \[24\]"):
        init_from_checkpoint(drafter, {"norm.weight": torch.ones(3)}, TINY, "ckpt")
    assert all(torch.equal(before[n], p) for n, p in drafter.state_dict().items())


def test_draft_ids_must_mean_the_same_tokens() -> None:
    assert vocabulary_tensors(TINY) == ("markov_head.markov_w2.weight",)
    assert vocabulary_tensors(DFLASH) == ()
    ids, other = torch.arange(17), torch.arange(1, 18)
    drafter, earlier = BlockDrafter(REDUCED), make_drafter(REDUCED)
    with pytest.raises(RecipeError, match=r"markov_w2\.weight counts by draft ids"):
        init_from_checkpoint(drafter, earlier.state_dict(), REDUCED, "ckpt", source_ids=ids, target_ids=other)
    assert init_from_checkpoint(drafter, earlier.state_dict(), REDUCED, "ckpt", source_ids=ids, target_ids=ids.clone()) == []
    headless = replace(DFLASH, draft_vocab_size=17)
    init_from_checkpoint(BlockDrafter(REDUCED), make_drafter(headless).state_dict(), headless, "ckpt", source_ids=ids, target_ids=other)


def test_every_start_is_a_part_of_its_algorithm() -> None:
    made = {"dspark": FILL_IN, "dflash2": DFLASH2, "dflash": DFLASH}
    for name, starts in ((n, get_spec(n).starts_from) for n in names()):
        for start in starts:
            whole, part = get_spec(name).keys(made[name]), get_spec(start).keys(made[start])
            assert all(whole[key] == part[key] for key in part)
