"""MTP heads against their definition and against Transformers' own layers; sessions against training; starts and refusals."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from block_cases import make_batch, make_tables
from mtp_cases import LAYERS, TARGETS, WIDTH, make_mtp, mtp_config, written_out

from firesteel import recipe as recipes
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.mtp_format import adapt_to_target, fits_mtp, from_native, mtp_decay, mtp_keys, native_names, native_tensor, start_mtp
from firesteel.drafters.registry import get_spec
from firesteel.drafters.target_layer import FAMILIES
from firesteel.errors import CheckpointError, RecipeError, TargetError
from firesteel.losses.weights import exponential_weights
from firesteel.training.optimizer import split_parameters

LENGTHS = [9, 12, 7]
ANCHORS = [1, 2, 5, 8, 11, 14, 19, 23, 27]
DENSE = ["qwen3", "qwen3_5"]


def make_all(name: str, dtype: torch.dtype = torch.float64) -> Any:
    config = mtp_config(name)
    return config, make_mtp(config, dtype=dtype), make_tables(config, dtype=dtype), make_batch(config, LENGTHS, ANCHORS, dtype=dtype)


@pytest.mark.parametrize("name", DENSE)
def test_training_equals_the_definition(name: str) -> None:
    _, drafter, (embed, head, _), batch = make_all(name)
    z = drafter.training_rows(batch, embed, head).z
    for n, anchor in enumerate(ANCHORS):
        known = max(1, int((batch.slots[n] >= 0).sum()))  # the slots after the last predicting one are fed with other tokens
        torch.testing.assert_close(z[n, :known], written_out(drafter, batch, embed, anchor)[:known], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", TARGETS)
def test_step_one_is_the_classes_own_layer(name: str) -> None:
    """One document, every position an anchor: our layer is Transformers' decoder layer over a plain causal sequence."""
    config = replace(mtp_config(name), block_size=1)
    drafter, (embed, head, _) = make_mtp(config, dtype=torch.float32), make_tables(config)
    length = 17
    batch = make_batch(config, [length], list(range(1, length)))
    family = FAMILIES[TARGETS[name].model_type]
    classes: Any = importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    target = TARGETS[name]
    target._attn_implementation = target._experts_implementation = "eager"
    own = getattr(classes, f"{family.prefix}DecoderLayer")(target, LAYERS - 1)  # its last layer has full attention
    own.load_state_dict(drafter.mtp.layers[0].state_dict())
    norms = [drafter.mtp.pre_fc_norm_embedding, drafter.mtp.pre_fc_norm_hidden, drafter.mtp.norm]
    assert all(type(norm) is getattr(classes, f"{family.prefix}RMSNorm") for norm in norms)
    state = drafter.target_norm(batch.context[:-1, -WIDTH:])
    pairs = drafter.mtp.fc(torch.cat([norms[0](embed[batch.token_ids[1:]]), norms[1](state)], dim=-1))[None]
    rotary = getattr(classes, next(n for n in (f"{family.prefix}TextRotaryEmbedding", f"{family.prefix}RotaryEmbedding") if hasattr(classes, n)))(target)
    positions = torch.arange(length - 1)[None]
    mask = torch.full((length - 1, length - 1), -torch.inf).triu(1)[None, None]
    out = own(pairs, position_embeddings=rotary(pairs, positions), attention_mask=mask, position_ids=positions)
    wanted = norms[2](out[0] if isinstance(out, tuple) else out)[0]
    torch.testing.assert_close(drafter.training_rows(batch, embed, head).z[:, 0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_fast_equals_dense_forward_and_gradients(name: str) -> None:
    _, drafter, (embed, head, _), batch = make_all(name)
    found = []
    for path in ("dense", "fast"):
        drafter.zero_grad()
        z = drafter.training_rows(batch, embed, head, attention=path).z
        (z * torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view_as(z).cos()).sum().backward()
        found.append((z.detach(), {n: p.grad.clone() for n, p in drafter.named_parameters() if p.requires_grad}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-6)
    assert all(float(g.abs().max()) > 0 for g in found[0][1].values())
    for key, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], gradient, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", TARGETS)
def test_a_session_drafts_what_training_sees(name: str) -> None:
    """Fed with its own drafts: a greedy chain is the teacher-forced chain over a text that continues with the drafted tokens."""
    config, drafter, (embed, head, _), batch = make_all(name, torch.float32)
    session: Any = get_spec("mtp").session(drafter, embed, head, draft_to_target=None, max_length=64)
    for start, anchor in ((0, 5), (0, 8), (9, 14)):
        session.rewind(0)
        session.observe(batch.token_ids[start : start + 3], batch.context[start : start + 3])
        session.observe(batch.token_ids[start + 3 : anchor], batch.context[start + 3 : anchor])
        drafted = session.draft(int(batch.token_ids[anchor]), config.block_size).tokens
        assert session.draft(int(batch.token_ids[anchor]), 1).tokens == drafted[:1], "drafting must not change what was observed"
        n = ANCHORS.index(anchor)
        tokens = batch.token_ids.clone()
        future = torch.tensor(drafted)[: len(tokens) - anchor - 1]
        tokens[anchor + 1 : anchor + 1 + len(future)] = future
        twin = replace(batch, token_ids=tokens, slots=torch.where(batch.slots < 0, 0, batch.slots))
        logits = drafter.training_rows(twin, embed, head).z[n] @ head.T
        assert logits.argmax(-1).tolist()[: len(future) + 1] == drafted[: len(future) + 1]
        probs = session.draft(int(batch.token_ids[anchor]), 1, temperature=0.7, generator=torch.Generator().manual_seed(0)).probs
        torch.testing.assert_close(probs[0], (logits[0] / 0.7).softmax(-1), rtol=1e-4, atol=1e-5)


def test_steps_weigh_less_and_less() -> None:
    weights = exponential_weights(3, True, mtp_decay(mtp_config("qwen3_5")))
    torch.testing.assert_close(weights / weights.sum(), torch.tensor([1, 0.6, 0.36]) / 1.96)
    assert exponential_weights(3, True, mtp_decay(replace(mtp_config("qwen3_5"), extra={"beta": 1.0}))).tolist() == [1, 1, 1]


def test_only_the_head_is_trained_and_experts_go_to_adamw() -> None:
    drafter = make_mtp(mtp_config("qwen3_5_moe"))
    matrices, tables, rest = split_parameters(drafter)
    assert not any(p is drafter.target_norm.weight for p in (*matrices, *tables, *rest))
    assert {p.ndim for p in matrices} == {2}
    assert any(p is drafter.mtp.layers[0].mlp.experts.down_proj for p in rest)


@pytest.mark.parametrize("name", TARGETS)
def test_the_key_table_is_the_module(name: str) -> None:
    config = mtp_config(name)
    state = make_mtp(config).state_dict()
    assert {n: key.shape for n, key in mtp_keys(config).items()} == {n: tuple(t.shape) for n, t in state.items()}
    assert DraftConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(json.dumps(config.to_dict())).items()}) == config


@pytest.mark.parametrize("single", [False, True], ids=["experts-together", "experts-single"])
def test_a_native_head_is_read_and_found_again(single: bool) -> None:
    config = mtp_config("qwen3_5_moe")
    state = {n: t.float() for n, t in make_mtp(config).state_dict().items()}
    names = native_names(state) if single else [n for n in state if n.startswith("mtp.")]
    assert any(".experts.3.up_proj" in n for n in names) == single
    native = {}
    for name in names:
        found = native_tensor(name, state)
        assert found is not None
        native[name] = found[1]
    fresh: Any = get_spec("mtp").build(config)
    said = start_mtp(fresh, recipes.Drafter(algorithm="mtp"), state["target_norm.weight"], native)
    assert "native" in said
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert native_tensor("mtp.layers.0.mlp.experts.4.up_proj.weight", state) is None
    assert native_tensor("mtp.layers.1.input_layernorm.weight", state) is None
    for change, words in (
        ({"mtp.fc.weight": None}, "lacks mtp.fc.weight"),
        ({"mtp.fc.weight": torch.zeros(3, 3)}, r"mtp.fc.weight is \[3, 3\]"),
        ({"mtp.fc.weight_scale_inv": torch.zeros(1)}, "unknown mtp.fc.weight_scale_inv"),
        ({"mtp.fc.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, "float8"),
    ):
        broken = {n: t for n, t in {**native, **change}.items() if t is not None}
        with pytest.raises(TargetError, match=words):
            from_native(broken, mtp_keys(config))


def test_starts() -> None:
    config, norm = mtp_config("qwen3_5"), torch.full((WIDTH,), 1.5)
    drafter: Any = get_spec("mtp").build(config)
    before = drafter.mtp.fc.weight.clone()
    assert "noise: the target's files hold no mtp" in start_mtp(drafter, recipes.Drafter(), norm, {})
    assert torch.equal(drafter.mtp.fc.weight, before)
    assert torch.equal(drafter.target_norm.weight, norm)
    assert "begins as that of runs" in start_mtp(drafter, recipes.Drafter(init="runs/x/package"), norm, {"mtp.fc.weight": before})
    with pytest.raises(RecipeError, match=r"start=native, but the target's files hold no"):
        start_mtp(drafter, recipes.Drafter(mtp=recipes.Mtp(start="native")), norm, {})


def test_what_does_not_exist_is_refused() -> None:
    config = mtp_config("qwen3_5")
    for change, words in (
        ({"extra": {}}, "holds no layer"),
        ({"num_layers": 2, "layer_types": ("full_attention",) * 2}, "num_layers is 2"),
        ({"markov_rank": 4}, "neither Markov"),
        ({"target_hidden_size": 48}, "no target of width 48"),
        ({"extra": {**config.extra, "layer": {**config.extra["layer"], "model_type": "llama"}}}, "model type 'llama'"),
    ):
        with pytest.raises(CheckpointError, match=words):
            get_spec("mtp").build(replace(config, **change))
    with pytest.raises(RecipeError, match=r"end it with 4"):
        adapt_to_target(replace(config, layer_ids=(1, 3)), TARGETS["qwen3_5"].to_dict(), LAYERS)
    fits_mtp(recipes.Drafter(), TARGETS["qwen3_5"].to_dict(), dict)
    with pytest.raises(RecipeError, match=r"algorithm=mtp: no MTP head is known for targets of model type 'llama'"):
        fits_mtp(recipes.Drafter(), {**TARGETS["qwen3"].to_dict(), "model_type": "llama"}, dict)
