"""make_config and the registry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.build import TargetFacts, draft_vocab_size, make_config
from firesteel.drafters.config import FULL, SLIDING
from firesteel.drafters.registry import get_spec, names
from firesteel.errors import RecipeError
from firesteel.recipe import Drafter

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


def test_sizes_come_from_the_target_and_wishes_go_before() -> None:
    config = make_config(Drafter(), FACTS, [1, 3], 99)
    assert (config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 64, 4, 2, 8)
    assert (config.vocab_size, config.draft_vocab_size, config.layer_ids, config.mask_token_id) == (100, 100, (1, 3), 99)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 5e5, 512)
    assert (config.markov_rank, config.markov_head, config.confidence_head, config.sample_from_anchor) == (256, "vanilla", True, True)
    wishes = Drafter(
        intermediate_size=48, num_heads=6, num_kv_heads=3, head_dim=4, draft_vocab_size=20, sample_from_anchor=False, markov_head="gated", causal=True
    )
    config = make_config(wishes, FACTS, [0, 6], 5)
    assert (config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim) == (48, 6, 3, 4)
    assert (config.draft_vocab_size, config.sample_from_anchor, config.markov_head, config.causal) == (20, False, "gated", True)
    assert isinstance(get_spec("dspark").build(config), BlockDrafter)


def test_dflash_has_no_heads_whatever_their_settings() -> None:
    config = make_config(Drafter(algorithm="dflash", markov_head="rnn", markov_rank=0), FACTS, [1], 99)
    assert (config.markov_rank, config.confidence_head, config.sample_from_anchor, config.num_drafts) == (0, False, False, 7)


@pytest.mark.parametrize(("attention", "types"), [("full", (FULL,) * 3), ("sliding", (SLIDING,) * 3), ("mixed", (SLIDING, SLIDING, FULL))])
def test_layer_types(attention: str, types: tuple[str, ...]) -> None:
    assert make_config(Drafter(num_layers=3, attention=attention), FACTS, [1], 99).layer_types == types  # type: ignore[arg-type]


def test_rope_of_the_target() -> None:
    llama = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    assert make_config(Drafter(), replace(FACTS, rope_scaling=llama), [1], 99).rope_scaling == llama
    old = {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    assert make_config(Drafter(), replace(FACTS, rope_scaling=old), [1], 99).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    for foreign in (
        {"rope_type": "longrope", "short_factor": [1.0]},
        {"rope_type": "mrope", "mrope_section": [1]},
        {"rope_type": "default", "mrope_section": [1]},
    ):
        assert make_config(Drafter(), replace(FACTS, rope_scaling=foreign), [1], 99).rope_scaling is None


@pytest.mark.parametrize(
    ("settings", "facts", "layer_ids", "message"),
    [
        (Drafter(algorithm="dsprak"), FACTS, [1], "did you mean dspark"),
        (Drafter(algorithm="zzz"), FACTS, [1], "known: .*dflash.*dspark"),
        (Drafter(), FACTS, [1, 7], "layer_ids has 7"),
        (Drafter(), FACTS, [-1], "layer_ids has -1"),
        (Drafter(), FACTS, [], "captured layer"),
        (Drafter(num_heads=3), FACTS, [1], "num_kv_heads"),
        (Drafter(draft_vocab_size=101), FACTS, [1], "draft_vocab_size=101"),
        (Drafter(attention="mixed", num_layers=1), FACTS, [1], "two layers"),
        (Drafter(attention="sliding", sliding_window=8, block_size=9), FACTS, [1], "sliding_window=8"),
        (Drafter(markov_rank=0, markov_head="rnn"), FACTS, [1], "markov_rank=0"),
        (Drafter(init="target"), replace(FACTS, hidden_act="gelu_pytorch_tanh"), [1], "gelu"),
    ],
)
def test_contradictions_are_refused(settings: Drafter, facts: TargetFacts, layer_ids: list[int], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_config(settings, facts, layer_ids, 99)


def test_eagle3_has_a_reduced_vocabulary_unless_told_otherwise() -> None:
    large, eagle = replace(FACTS, vocab_size=151_936), Drafter(algorithm="eagle3")
    config = make_config(eagle, large, [1], None)
    assert (config.draft_vocab_size, config.vocab_size, config.reduced_vocab) == (32_000, 151_936, True)
    assert make_config(eagle, replace(FACTS, vocab_size=32_000), [1], None).draft_vocab_size == 32_000
    assert not make_config(eagle, FACTS, [1], None).reduced_vocab
    assert not make_config(Drafter(algorithm="eagle3", draft_vocab_size=151_936), large, [1], None).reduced_vocab
    assert make_config(Drafter(algorithm="eagle3", draft_vocab_size=8192), large, [1], None).draft_vocab_size == 8192
    for name in set(names()) - {"eagle3"}:
        assert draft_vocab_size(Drafter(algorithm=name), 151_936) == 151_936, name


def test_an_empty_size_of_the_vocabulary_keeps_that_of_the_checkpoint() -> None:
    eagle = Drafter(algorithm="eagle3")
    whole = make_config(Drafter(algorithm="eagle3", draft_vocab_size=151_936), replace(FACTS, vocab_size=151_936), [1], None)
    assert draft_vocab_size(eagle, 151_936, whole) == 151_936
    small = replace(whole, draft_vocab_size=4096)
    assert draft_vocab_size(eagle, 151_936, small) == 4096
    assert draft_vocab_size(Drafter(algorithm="eagle3", draft_vocab_size=8192), 151_936, small) == 8192
    assert draft_vocab_size(Drafter(algorithm="dflash2"), 151_936, replace(small, algorithm="dflash")) == 151_936, "it has no reduced vocabulary"
    assert draft_vocab_size(eagle, 100, small) == 100, "a drafter of another target"


def test_mask_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RecipeError, match="mask_token_id=100"):
        make_config(Drafter(), FACTS, [1], 100)


def test_registry_knows_both() -> None:
    assert {"dspark", "dflash"} <= set(names())
