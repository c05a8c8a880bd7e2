"""A first layer that hands the newest captured state over: against positions taken one by one, and against the state itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_cases import TINY, make_batch, make_drafter, make_tables
from torch import Tensor
from torch.nn import functional as F

from firesteel.batches.batch import Batch
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.carry import carry_state, nearest
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.init import init_from_target
from firesteel.drafters.rope import Rope, rotate

WIDE = replace(
    TINY, hidden_size=64, target_hidden_size=64, head_dim=32, num_heads=2, num_kv_heads=2, num_layers=1, layer_types=TINY.layer_types[:1], rope_theta=1e4
)
FEATURE = 1


@pytest.mark.parametrize(("theta", "width"), [(1e4, 64), (1e5, 64), (1e6, 128)])
def test_the_nearest_position_has_the_weight_whichever_slot_asks(theta: float, width: int) -> None:
    """Queries and keys turned by the drafter's own RoPE, at positions of a long text."""
    rope = Rope(replace(TINY, head_dim=width, rope_theta=theta))
    found = nearest(rope.inverse, 8)
    assert found.key.norm() == pytest.approx(1.0)
    assert found.query.norm() == pytest.approx(1.0)
    anchor = 1500
    keys = rotate(found.key[None, None], rope.table(torch.arange(anchor), torch.float32))[:, 0]
    for slot in range(8):
        query = rotate(found.query[None, None], rope.table(torch.tensor([anchor + slot]), torch.float32))[0, 0]
        weights = (32.0 * keys @ query).softmax(0)
        assert int(weights.argmax()) == anchor - 1
        assert float(weights[-1]) > 0.8
        assert float(weights[-1]) == pytest.approx(float(found.weight[slot]), abs=0.02)


def started(config: DraftConfig, *, spread: float = 1.0) -> tuple[BlockDrafter, Batch, Tensor]:
    """A drafter with a target's layer that carries, a batch of states whose directions differ in size by `spread`, and the embedding."""
    drafter, batch, (embed, _, _) = make_drafter(config), make_batch(config, [90, 70], [20, 60, 100, 140]), make_tables(config)
    h = config.hidden_size
    with torch.no_grad():
        sizes = torch.logspace(0, -torch.tensor(spread).log10().item(), h) if spread != 1 else torch.ones(h)
        batch.context = (batch.context.unflatten(-1, (-1, h)) * sizes).flatten(1) + 3 * torch.ones(len(config.layer_ids) * h)
    layer = {n: p.detach().clone() for n, p in make_drafter(config, seed=5).layers[0].named_parameters()}
    layer["input_layernorm.weight"] = torch.rand(h) + 0.5
    init_from_target(drafter, [layer], feature=FEATURE)
    with torch.no_grad():
        drafter.fc.weight[:, :h] = 0
    return drafter, batch, embed


def handed(drafter: BlockDrafter, batch: Batch, embed: Tensor) -> Tensor:
    """What the first layer's attention adds to every slot, `[N, g, h]`."""
    seen: list[Tensor] = []
    hook = drafter.layers[0].post_attention_layernorm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        drafter.states(batch, embed, "dense")
    hook.remove()
    return seen[0] - drafter.block_inputs(batch.token_ids[batch.anchors], embed, batch.block_size)


def test_every_slot_gets_the_state_before_the_anchor() -> None:
    drafter, batch, embed = started(WIDE)
    right = carry_state(drafter, [batch], embed, feature=FEATURE)
    assert right > 0.99
    states = batch.context.unflatten(-1, (-1, 64))[:, FEATURE]
    before = states[batch.anchors - 1]
    wanted = before / before.pow(2).mean(-1, keepdim=True).sqrt() * 0.25 * states.pow(2).mean(-1).sqrt().median()
    got = handed(drafter, batch, embed)
    for slot in range(batch.block_size):
        centred = got[:, slot] - states.mean(0), wanted - states.mean(0)
        assert F.cosine_similarity(*centred).min() > 0.9, slot
        torch.testing.assert_close(got[:, slot].norm(dim=-1), wanted.norm(dim=-1), rtol=0.2, atol=0)


def test_with_fewer_heads_it_gets_the_directions_that_hold_most() -> None:
    config = replace(WIDE, num_heads=4, num_kv_heads=1)
    drafter, batch, embed = started(config, spread=30.0)
    states = batch.context.unflatten(-1, (-1, 64))[:, FEATURE]
    carry_state(drafter, [batch], embed, feature=FEATURE)
    got, before = handed(drafter, batch, embed), states[batch.anchors - 1]
    assert int(torch.linalg.matrix_rank(drafter.layers[0].self_attn.o_proj.weight)) == 32
    assert F.cosine_similarity(got[:, 0], before).min() > 0.95


def test_heads_that_do_not_carry_keep_what_they_were_given() -> None:
    drafter, batch, embed = started(replace(WIDE, num_heads=3, num_kv_heads=3))
    attention = drafter.layers[0].self_attn
    kept = [p[64:].detach().clone() for p in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)]
    carry_state(drafter, [batch], embed, feature=FEATURE)
    for was, p in zip(kept, (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight), strict=True):
        assert torch.equal(was, p[64:])


def test_a_target_s_layer_with_its_keys_repeated_is_the_same_layer() -> None:
    few, many = replace(TINY, num_kv_heads=2), replace(TINY, num_kv_heads=4)
    layers: list[dict[str, Any]] = [{n: p.detach() for n, p in layer.named_parameters()} for layer in make_drafter(few, seed=5).layers]
    one, other = make_drafter(few), make_drafter(many)
    batch, (embed, _, _) = make_batch(few, [30], [10, 20]), make_tables(few)
    for drafter in (one, other):
        init_from_target(drafter, layers, torch.ones(24), feature=1)
    with torch.no_grad():
        other.fc.weight.copy_(one.fc.weight)
        torch.testing.assert_close(other.states(batch, embed, "dense"), one.states(batch, embed, "dense"))
