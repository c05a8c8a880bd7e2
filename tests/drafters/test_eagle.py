"""EAGLE-3 and P-EAGLE against their definition; sessions against training; dropping; refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_cases import make_batch, make_tables
from eagle_cases import EAGLE3, PEAGLE, VARIANTS, flagged, make_eagle, written_out

from firesteel.drafters.init import init_from_target
from firesteel.drafters.peagle import chain_lengths
from firesteel.drafters.registry import get_spec
from firesteel.errors import CheckpointError, RecipeError, ResourceError

LENGTHS = [9, 12, 7]
ANCHORS = [1, 2, 5, 8, 11, 14, 19, 23, 27]


def make_all(name: str, dtype: torch.dtype = torch.float64) -> Any:
    config = VARIANTS[name]
    return config, make_eagle(config, dtype=dtype), make_tables(config, dtype=dtype), make_batch(config, LENGTHS, ANCHORS, dtype=dtype)


@pytest.mark.parametrize("name", VARIANTS)
def test_training_equals_the_definition(name: str) -> None:
    _, drafter, (embed, head, _), batch = make_all(name)
    z = drafter.eval().training_rows(batch, embed, head).z
    for n, anchor in enumerate(ANCHORS):
        known = int((batch.slots[n] >= 0).sum())  # the slots after the last predicting one are fed with another document's tokens
        torch.testing.assert_close(z[n, : max(1, known)], written_out(drafter, batch, embed, anchor)[: max(1, known)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_fast_equals_dense_forward_and_gradients(name: str) -> None:
    _, drafter, (embed, head, _), batch = make_all(name)
    found = []
    for path in ("dense", "fast"):
        drafter.zero_grad()
        z = drafter.eval().training_rows(batch, embed, head, attention=path).z
        (z * torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view_as(z).cos()).sum().backward()
        found.append((z.detach(), {n: p.grad.clone() for n, p in drafter.named_parameters()}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-10, atol=1e-10)
    assert all(float(g.abs().max()) > 0 for g in found[0][1].values())
    for key, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], gradient, rtol=1e-8, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_session_drafts_what_training_sees(name: str) -> None:
    """Fed with its own drafts: a greedy chain is the teacher-forced chain over a text that continues with the drafted tokens."""
    config, drafter, (embed, head, ids), batch = make_all(name, torch.float32)
    drafter.eval()
    spec = get_spec(config.algorithm)
    session: Any = spec.session(drafter, embed, head, draft_to_target=ids if config.reduced_vocab else None, max_length=64)
    for start, anchor in ((0, 5), (0, 8), (9, 14)):
        session.rewind(0)
        session.observe(batch.token_ids[start : start + 3], batch.context[start : start + 3])
        session.observe(batch.token_ids[start + 3 : anchor], batch.context[start + 3 : anchor])
        drafted = session.draft(int(batch.token_ids[anchor]), config.block_size).tokens
        again = session.draft(int(batch.token_ids[anchor]), 1).tokens
        assert again == drafted[:1], "drafting must not change what was observed"
        n = ANCHORS.index(anchor)
        tokens = batch.token_ids.clone()
        future = torch.tensor(drafted)[: len(tokens) - anchor - 1]
        tokens[anchor + 1 : anchor + 1 + len(future)] = future
        twin = replace(batch, token_ids=tokens, slots=torch.where(batch.slots < 0, 0, batch.slots))
        z = drafter.training_rows(twin, embed, head).z[n]
        wanted = ids[(z @ head.T).argmax(-1)] if config.reduced_vocab else (z @ head.T).argmax(-1)
        assert wanted.tolist()[: len(future) + 1] == drafted[: len(future) + 1]


@pytest.mark.parametrize("name", ["eagle3", "eagle3-reduced", "peagle"])
def test_sampled_drafts_come_with_their_distributions(name: str) -> None:
    config, drafter, (embed, head, ids), batch = make_all(name, torch.float32)
    session: Any = get_spec(config.algorithm).session(drafter.eval(), embed, 0.1 * head, draft_to_target=ids if config.reduced_vocab else None, max_length=64)
    session.observe(batch.token_ids[:5], batch.context[:5])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(config.vocab_size)
    draft = session.draft(int(batch.token_ids[5]), 1, temperature=0.7, generator=generator)
    wanted = session.expand(draft.probs)[0]
    for _ in range(4000):
        counts[session.draft(int(batch.token_ids[5]), 1, temperature=0.7, generator=generator).tokens[0]] += 1
    assert wanted.shape == (config.vocab_size,)
    assert float((counts / counts.sum() - wanted).abs().sum()) / 2 < 0.05
    assert float(wanted.max()) < 0.9, "a sharp distribution would prove nothing"


def test_rewinding_forgets() -> None:
    config, drafter, (embed, head, _), batch = make_all("eagle3-mixed", torch.float32)
    make = get_spec("eagle3").session
    one: Any = make(drafter.eval(), embed, head, draft_to_target=None, max_length=64)
    other: Any = make(drafter, embed, head, draft_to_target=None, max_length=64)
    one.observe(batch.token_ids[:8], batch.context[:8])
    other.observe(batch.token_ids[:4], batch.context[:4])
    other.observe([1, 2, 3], batch.context[20:23])
    other.draft(7, 3)
    other.rewind(4)
    other.observe(batch.token_ids[4:8], batch.context[4:8])
    assert one.draft(5, config.block_size).tokens == other.draft(5, config.block_size).tokens


def test_dropping_keeps_a_nested_share_of_the_chains() -> None:
    batch = make_batch(replace(PEAGLE, block_size=5), [200], list(range(1, 101)))
    lengths = chain_lengths(batch, 0.6, 0.2)
    alive = [int((lengths > depth).sum()) for depth in range(5)]
    assert alive == [100, 60, 36, 22, 20]
    assert torch.equal(lengths, chain_lengths(batch, 0.6, 0.2)), "a resumed run drops the same slots"
    other = chain_lengths(make_batch(replace(PEAGLE, block_size=5), [200], list(range(2, 102))), 0.6, 0.2)
    assert not torch.equal(lengths, other)


def test_dropped_slots_are_left_out_and_change_nothing_else() -> None:
    config = flagged(PEAGLE, drop_ratio=0.5, drop_floor=0.0)
    drafter, (embed, head, _) = make_eagle(config), make_tables(config, dtype=torch.float64)
    batch = make_batch(config, LENGTHS, ANCHORS, dtype=torch.float64)
    whole = drafter.eval().training_rows(batch, embed, head)
    part = drafter.train().training_rows(batch, embed, head)
    assert whole.kept is None
    assert 0 < int(part.kept.sum()) < part.kept.numel()
    torch.testing.assert_close(part.z[part.kept], whole.z[part.kept])
    assert float(part.z.detach()[~part.kept].abs().max()) == 0


def test_starting_from_the_target_hands_the_state_to_its_layer() -> None:
    """With no embedding in it, the first pair of the drafter is the target's layer at work on the captured state."""
    h, drafter = EAGLE3.hidden_size, make_eagle(EAGLE3)
    own = dict(drafter.named_parameters())
    source = {
        name.removeprefix("layers.0."): torch.randn(p.shape[0], h, dtype=p.dtype) if p.shape[1:] == (2 * h,) else torch.randn_like(p)
        for name, p in own.items()
        if name.startswith("layers.0.") and "hidden_norm" not in name
    }
    init_from_target(drafter, [source], torch.ones(h, dtype=torch.float64), feature=1)
    layer = drafter.layers[0]
    aux = torch.randn(3, 2 * h, dtype=torch.float64)
    y, _ = layer.enter((torch.randn(3, h, dtype=torch.float64), drafter.features(torch.cat([0 * aux[:, :h], aux[:, h:]], dim=1))))
    normed = torch.nn.functional.rms_norm(aux[:, h:], (h,), source["input_layernorm.weight"], EAGLE3.rms_norm_eps)
    torch.testing.assert_close(layer.self_attn.v_proj(y), normed @ source["self_attn.v_proj.weight"].T)
    with pytest.raises(RecipeError, match="layer_style=qwen3"):
        init_from_target(drafter, [source | {"self_attn.q_norm.weight": torch.ones(8), "self_attn.k_norm.weight": torch.ones(8)}])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (flagged(EAGLE3, layer_style="gpt"), "layer_style 'gpt'"),
        (flagged(EAGLE3, norm_output=None), "norm_output must be true or false"),
        (flagged(EAGLE3, fc_norm=True, norm_before_fc=True), "both true"),
        (replace(EAGLE3, hidden_act="gelu"), "activation 'gelu'"),
        (replace(EAGLE3, target_hidden_size=48), "width 24 cannot share"),
        (replace(EAGLE3, layer_types=("linear_attention",)), "layer type 'linear_attention'"),
        (replace(EAGLE3, markov_rank=4), "has no heads"),
        (replace(PEAGLE, mask_token_id=None), "needs a mask token"),
    ],
)
def test_what_does_not_exist_is_refused(config: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        get_spec(config.algorithm).build(config)


def test_a_session_says_what_it_cannot_do() -> None:
    config, drafter, (embed, head, _), batch = make_all("eagle3", torch.float32)
    make = get_spec("eagle3").session
    session: Any = make(drafter, embed, head, draft_to_target=None, max_length=8)
    with pytest.raises(RecipeError, match="nothing was observed"):
        session.draft(1, 1)
    session.observe(batch.token_ids[:8], batch.context[:8])
    with pytest.raises(ResourceError, match="8 positions was given 9"):
        session.observe([1], batch.context[:1])
    with pytest.raises(RecipeError, match="cannot draft 4 tokens"):
        session.draft(1, config.block_size + 1)
    with pytest.raises(RecipeError, match="temperatures"):
        make(drafter, embed, head, draft_to_target=None, max_length=8, confidence_temperatures=[1.0])
    with pytest.raises(RecipeError, match="needs draft_to_target"):
        make(make_eagle(VARIANTS["eagle3-reduced"], dtype=torch.float32), embed, head[:17], draft_to_target=None, max_length=8)
