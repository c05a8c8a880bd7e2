"""Heads, rope, init and names of the block drafter against hand-written references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_cases import DFLASH, REDUCED, TINY, make_batch, make_drafter, make_tables
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.init import init_from_target
from firesteel.drafters.rope import Rope, rotate
from firesteel.errors import CheckpointError, RecipeError

LAYER = {
    "self_attn.q_proj.weight": (32, 24),
    "self_attn.k_proj.weight": (16, 24),
    "self_attn.v_proj.weight": (16, 24),
    "self_attn.o_proj.weight": (24, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "mlp.gate_proj.weight": (40, 24),
    "mlp.up_proj.weight": (40, 24),
    "mlp.down_proj.weight": (24, 40),
    "input_layernorm.weight": (24,),
    "post_attention_layernorm.weight": (24,),
}
BACKBONE = {"fc.weight": (24, 48), "hidden_norm.weight": (24,), "norm.weight": (24,)} | {f"layers.{i}.{k}": v for i in range(2) for k, v in LAYER.items()}
VANILLA = {"markov_head.markov_w1.weight": (50, 6), "markov_head.markov_w2.weight": (17, 6)}
CONFIDENCE = {"confidence_head.proj.weight": (1, 30), "confidence_head.proj.bias": (1,)}


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (DFLASH, {}),
        (REDUCED, VANILLA | CONFIDENCE),
        (replace(REDUCED, confidence_with_markov=False), VANILLA | {"confidence_head.proj.weight": (1, 24), "confidence_head.proj.bias": (1,)}),
        (replace(REDUCED, markov_head="gated"), VANILLA | CONFIDENCE | {"markov_head.gate_proj.weight": (6, 30), "markov_head.gate_proj.bias": (6,)}),
        (replace(REDUCED, markov_head="rnn"), VANILLA | CONFIDENCE | {"markov_head.joint_proj.weight": (18, 36), "markov_head.joint_proj.bias": (18,)}),
    ],
)
def test_names_and_shapes_are_the_checkpoint_keys(config: DraftConfig, heads: dict[str, tuple[int, ...]]) -> None:
    assert {k: tuple(v.shape) for k, v in BlockDrafter(config).state_dict().items()} == BACKBONE | heads


def test_markov_and_confidence_formulas() -> None:
    """Everything behind z, with plain loops over blocks and slots."""
    for kind in ("vanilla", "gated", "rnn"):
        for anchor_mode in (True, False):
            config = replace(REDUCED, markov_head=kind, sample_from_anchor=anchor_mode)
            drafter, (embed, head, _) = make_drafter(config), make_tables(config)
            batch = make_batch(config, [20], [2, 9, 15])
            rows = drafter.training_rows(batch, embed, head)
            p = dict(drafter.named_parameters())
            w1, w2 = p["markov_head.markov_w1.weight"], p["markov_head.markov_w2.weight"]
            logits = torch.stack([r @ w.T for r, w in rows.pieces]).sum(0).view(3, 4, 17)
            for n, anchor in enumerate([2, 9, 15]):
                s = torch.zeros(6)
                for k in range(0 if anchor_mode else 1, 4):
                    x = batch.token_ids[anchor + k if anchor_mode else anchor + k - 1]
                    z, e = rows.z[n, k], w1[x]
                    if kind == "vanilla":
                        row = e
                    elif kind == "gated":
                        row = torch.sigmoid(p["markov_head.gate_proj.weight"] @ torch.cat([z, e]) + p["markov_head.gate_proj.bias"]) * e
                    else:
                        q = p["markov_head.joint_proj.weight"] @ torch.cat([s, e, z]) + p["markov_head.joint_proj.bias"]
                        s = torch.sigmoid(q[:6]) * s + (1 - torch.sigmoid(q[:6])) * torch.tanh(q[6:12])
                        row = torch.tanh(q[12:])
                    torch.testing.assert_close(logits[n, k], head @ z + w2 @ row, rtol=1e-4, atol=1e-4)
                    assert rows.confidence_logits is not None
                    confidence = p["confidence_head.proj.weight"][0] @ torch.cat([z, e]) + p["confidence_head.proj.bias"][0]
                    torch.testing.assert_close(rows.confidence_logits[n, k], confidence, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
)
def test_rope_equals_transformers(scaling: dict[str, object] | None) -> None:
    config = replace(TINY, rope_scaling=scaling, rope_theta=500.0, max_position_embeddings=64)
    rope_parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 500.0}
    reference = Qwen3RotaryEmbedding(
        Qwen3Config(hidden_size=24, num_attention_heads=4, head_dim=8, max_position_embeddings=64, rope_parameters=rope_parameters)
    )
    positions = torch.tensor([[0, 1, 7, 63]])
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)  # [batch, heads, positions, D]
    expected = apply_rotary_pos_emb(q, k, *reference(q, positions))
    table = Rope(config).table(positions, torch.float32)
    for x, y in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rotate(x.transpose(1, 2), table).transpose(1, 2), y, rtol=1e-5, atol=1e-5)
    with torch.device("meta"):  # as a run's preflight builds drafters
        assert all(p.is_meta for p in BlockDrafter(config).parameters())


def test_rope_that_cannot_be_is_refused() -> None:
    with pytest.raises(RecipeError, match="longrope"):
        Rope(replace(TINY, rope_scaling={"rope_type": "longrope"}))
    with pytest.raises(RecipeError, match="odd"):
        Rope(replace(TINY, head_dim=7))


def test_layer_is_qwen3s_when_there_is_no_context() -> None:
    """At a document's first token a block is a bidirectional Qwen3 layer over its own slots."""
    config = replace(DFLASH, num_layers=1, layer_types=("full_attention",))
    drafter, (embed, _, _) = make_drafter(config), make_tables(config)
    hf = Qwen3Config(hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1, rms_norm_eps=1e-6)
    hf._attn_implementation = "sdpa"
    layer = Qwen3DecoderLayer(hf, 0)
    layer.load_state_dict(drafter.layers[0].state_dict())
    batch = make_batch(config, [9], [0])
    x = drafter.block_inputs(batch.token_ids[:1], embed, 4)
    positions = torch.arange(4)[None]
    y = layer(x, attention_mask=torch.zeros(1, 1, 4, 4), position_ids=positions, position_embeddings=Qwen3RotaryEmbedding(hf)(x, positions))
    y = y[0] if isinstance(y, tuple) else y
    torch.testing.assert_close(drafter.states(batch, embed), drafter.norm(y), rtol=1e-4, atol=1e-4)


def test_context_enters_keys_and_values_directly() -> None:
    """One layer, one head, written out: keys and values of the context are projections of hidden_norm(fc(aux)), no layer norm between."""
    config = replace(DFLASH, num_layers=1, layer_types=("full_attention",), num_heads=1, num_kv_heads=1)
    drafter, (embed, _, _) = make_drafter(config), make_tables(config)
    batch = make_batch(config, [9], [5])
    a, rope, layer = drafter.layers[0].self_attn, Rope(config), drafter.layers[0]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x[:, None], rope.table(positions, torch.float32))[:, 0]

    c = norm(batch.context[:5] @ drafter.fc.weight.T, drafter.hidden_norm.weight)
    x = embed[torch.tensor([int(batch.token_ids[5]), 49, 49, 49])]
    y = norm(x, layer.input_layernorm.weight)
    here = torch.arange(5, 9)
    q = turned(norm(y @ a.q_proj.weight.T, a.q_norm.weight), here)
    k = torch.cat([turned(norm(c @ a.k_proj.weight.T, a.k_norm.weight), torch.arange(5)), turned(norm(y @ a.k_proj.weight.T, a.k_norm.weight), here)])
    v = torch.cat([c, y]) @ a.v_proj.weight.T
    x = x + (q @ k.T / 8**0.5).softmax(-1) @ v @ a.o_proj.weight.T
    y = norm(x, layer.post_attention_layernorm.weight)
    x = x + (F.silu(y @ layer.mlp.gate_proj.weight.T) * (y @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    torch.testing.assert_close(drafter.states(batch, embed)[0], norm(x, drafter.norm.weight), rtol=1e-4, atol=1e-4)


def test_a_new_dspark_is_a_dflash_with_even_confidence() -> None:
    drafter, (embed, head, _) = BlockDrafter(TINY), make_tables(TINY)
    rows = drafter.training_rows(make_batch(TINY, [9], [3]), embed, head)
    assert bool((rows.pieces[1][1] == 0).all())
    assert rows.confidence_logits is not None
    assert bool((rows.confidence_logits == 0).all())
    assert bool(rows.pieces[1][0].any())  # W1 is not zero, or W2 would never learn
    assert float(drafter.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_init_from_target_copies_the_last_layers() -> None:
    hf = Qwen3Config(hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=2)
    layers = [dict(Qwen3DecoderLayer(hf, i).state_dict()) for i in range(2)]
    layers[1]["self_attn.q_norm.weight"] = torch.rand(8)
    norm = torch.rand(24)
    drafter = BlockDrafter(TINY)
    init_from_target(drafter, layers, norm)
    for i in range(2):
        own = drafter.layers[i].state_dict()
        assert own.keys() == layers[i].keys()
        assert all(torch.equal(own[k], layers[i][k]) for k in own)
    torch.testing.assert_close(drafter.norm.weight.detach(), 0.3 * norm)
    llama = [{k: v for k, v in layer.items() if "_norm.weight" not in k or "layernorm" in k} for layer in layers]
    init_from_target(drafter, llama)


def test_init_from_target_gives_the_context_the_keys_and_values_of_the_copied_layer() -> None:
    hf = Qwen3Config(hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=2)
    torch.manual_seed(4)
    source = Qwen3DecoderLayer(hf, 0).eval()
    source.input_layernorm.weight.data.uniform_(0.5, 2.0)
    drafter = BlockDrafter(replace(TINY, num_layers=1, layer_types=TINY.layer_types[:1]))
    init_from_target(drafter, [dict(source.state_dict())], torch.rand(24), feature=1)
    drafter.fc.weight.data[:, :24] = 0  # what noise adds of the other captured state
    state = 7 * torch.randn(5, 24)
    aux = torch.cat([torch.randn(5, 24), state, torch.zeros(5, drafter.fc.in_features - 48)], dim=1)
    features = drafter.hidden_norm(drafter.fc(aux))
    torch.testing.assert_close(features, source.input_layernorm(state), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drafter.layers[0].self_attn.v_proj(features), source.self_attn.v_proj(source.input_layernorm(state)), rtol=1e-4, atol=1e-4)


def test_init_from_target_refuses_what_does_not_fit() -> None:
    drafter = BlockDrafter(TINY)
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    good = {k: torch.ones(v) for k, v in LAYER.items()}
    with pytest.raises(RecipeError, match="1 target layers"):
        init_from_target(drafter, [good])
    with pytest.raises(RecipeError, match=r"layers.1.mlp.up_proj.weight is \[40, 24\] in the drafter and \[80, 24\]"):
        init_from_target(drafter, [good, good | {"mlp.up_proj.weight": torch.ones(80, 24)}])
    with pytest.raises(RecipeError, match=r"no self_attn\.q_proj"):
        init_from_target(drafter, [good, {k: v for k, v in good.items() if "q_proj" not in k}])
    assert all(torch.equal(v, before[k]) for k, v in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ("full_attention", "linear_attention")}, "linear_attention"),
        ({"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 3}, "sliding_window=3"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"target_hidden_size": 32}, "width 24"),
        ({"markov_head": "conv"}, "conv"),
    ],
)
def test_configs_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises((RecipeError, CheckpointError), match=message):
        BlockDrafter(replace(TINY, **change))  # type: ignore[arg-type]
