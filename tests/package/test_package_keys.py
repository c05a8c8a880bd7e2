"""The key table against a list written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from package_toys import CONFIGS, DFLASH, DSPARK

from firesteel.drafters.registry import get_spec
from firesteel.errors import CheckpointError
from firesteel.package.keys import Key, check_tensors, drafter_keys, vocab_keys

# hidden 24, 4 heads of 8, 2 key/value heads, MLP 40, 3 captured layers of 24, vocabulary 40, rank 6.
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
BACKBONE = {"fc.weight": (24, 72), "hidden_norm.weight": (24,), "norm.weight": (24,)} | {f"layers.{i}.{k}": v for i in (0, 1) for k, v in LAYER.items()}
VANILLA = {"markov_head.markov_w1.weight": (40, 6), "markov_head.markov_w2.weight": (40, 6)}
CONFIDENCE = {"confidence_head.proj.weight": (1, 30), "confidence_head.proj.bias": (1,)}
# EAGLE: no q/k norms in Llama's style; the first layer reads token and state side by side.
PLAIN = {k: v for k, v in LAYER.items() if "_norm" not in k}
PAIRS = {"fc.weight": (24, 72), "norm.weight": (24,), "layers.0.hidden_norm.weight": (24,)} | {
    f"layers.0.{k}": (v[0], 48) if k.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else v for k, v in PLAIN.items()
}
EXPECTED = {
    "vanilla": BACKBONE | VANILLA | CONFIDENCE,
    "gated": BACKBONE | VANILLA | CONFIDENCE | {"markov_head.gate_proj.weight": (6, 30), "markov_head.gate_proj.bias": (6,)},
    "rnn": BACKBONE
    | VANILLA
    | {"markov_head.joint_proj.weight": (18, 36), "markov_head.joint_proj.bias": (18,)}
    | CONFIDENCE
    | {"confidence_head.proj.weight": (1, 24)},
    "reduced": BACKBONE | VANILLA | {"markov_head.markov_w2.weight": (10, 6)} | CONFIDENCE,
    "no-confidence": BACKBONE | VANILLA,
    "no-markov": BACKBONE | CONFIDENCE | {"confidence_head.proj.weight": (1, 24)},
    "dflash": BACKBONE,
    "dflash-reduced": BACKBONE,
    "eagle3": PAIRS,
    "eagle3-qwen3": PAIRS | {f"fc_norm.{i}.weight": (24,) for i in range(3)} | {f"layers.0.self_attn.{n}_norm.weight": (8,) for n in "qk"},
    "eagle3-sliding": PAIRS | {"input_norm.weight": (72,)} | {f"layers.1.{k}": v for k, v in PLAIN.items()},
    "peagle": PAIRS | {"mask_hidden": (1, 1, 72)},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_names_and_shapes(name: str) -> None:
    assert {k: v.shape for k, v in drafter_keys(CONFIGS[name]).items()} == EXPECTED[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_drafter_has_the_tables_parameters(name: str) -> None:
    state = get_spec(CONFIGS[name].algorithm).build(CONFIGS[name]).state_dict()
    assert {k: tuple(v.shape) for k, v in state.items()} == {k: v.shape for k, v in drafter_keys(CONFIGS[name]).items()}


def test_a_wider_target_widens_only_the_projection() -> None:
    keys = drafter_keys(replace(DFLASH, target_hidden_size=50))
    assert keys.pop("fc.weight").shape == (24, 150)
    assert {k: v.shape for k, v in keys.items()} == {k: v for k, v in BACKBONE.items() if k != "fc.weight"}


def test_vocabulary_keys() -> None:
    assert vocab_keys(DSPARK) == {}
    assert vocab_keys(CONFIGS["reduced"]) == {"lm_head.weight": Key((10, 24)), "d2t": Key((10,), "index"), "t2d": Key((40,), "mask")}


def test_only_the_confidence_head_keeps_full_precision() -> None:
    keys = drafter_keys(DSPARK)
    full = {name for name, key in keys.items() if key.dtype(torch.bfloat16) == torch.float32}
    assert full == set(CONFIDENCE)
    assert {key.dtype(torch.bfloat16) for name, key in keys.items() if name not in full} == {torch.bfloat16}
    assert (Key((1,), "index").dtype(torch.bfloat16), Key((1,), "mask").dtype(torch.bfloat16)) == (torch.int64, torch.bool)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(DSPARK, algorithm="medusa"), ["medusa", "dspark"]),
        (replace(DFLASH, markov_rank=4), ["dflash", "markov_rank=4"]),
        (replace(DFLASH, confidence_head=True), ["dflash", "confidence_head=True"]),
        (replace(DSPARK, markov_head="cubic"), ["markov_head", "cubic"]),
    ],
)
def test_contradictory_heads_are_refused(config: object, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as e:
        drafter_keys(config)  # type: ignore[arg-type]
    assert all(word in str(e.value) for word in words)


def test_tensors_must_match_the_table() -> None:
    wanted = {"a": Key((2, 3)), "b": Key((1,))}
    check_tensors({"a": torch.zeros(2, 3), "b": torch.zeros(1)}, wanted, what="x")
    with pytest.raises(CheckpointError, match=r"x lacks b and holds c"):
        check_tensors({"a": torch.zeros(2, 3), "c": torch.zeros(1)}, wanted, what="x")
    with pytest.raises(CheckpointError, match=r"x: a has shape \[3, 2\], the configuration gives \[2, 3\]"):
        check_tensors({"a": torch.zeros(3, 2), "b": torch.zeros(1)}, wanted, what="x")
