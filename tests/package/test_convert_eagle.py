"""EAGLE-3 from SafeAILab, SpecForge and DeepSpec: keys, captured layers and draft vocabulary come over, and go back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from convert_cases import EAGLE3, QWEN3, H, V, eagle, eagle_shapes, layer_shapes, opened, random_tensors, refused, save, target_tables, vocabulary
from package_toys import CONFIGS, toy_export
from safetensors.torch import load_file

from firesteel.drafters.eagle3 import Eagle3Drafter
from firesteel.drafters.eagle_session import EagleSession
from firesteel.errors import CheckpointError
from firesteel.package.convert.convert import write
from firesteel.package.load import load

SAFEAI = {"layer_style": "llama", "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


def test_safeailab_keys_fields_and_rule(tmp_path: Path) -> None:
    found = opened(eagle(tmp_path), "target_layers=12")
    c = found.config
    assert (c.algorithm, c.layer_ids, c.block_size, c.head_dim, c.rope_theta) == ("eagle3", (2, 6, 9), 7, 8, 10000.0)
    assert (c.causal, c.sample_from_anchor, c.draft_vocab_size, c.extra) == (True, True, 10, SAFEAI)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found.tensors["layers.0.self_attn.q_proj.weight"], stored["midlayer.self_attn.q_proj.weight"])
    assert torch.equal(found.tensors["layers.0.hidden_norm.weight"], stored["midlayer.hidden_norm.weight"])
    assert found.target_ids is not None
    assert found.target_ids.tolist() == [0, 1, 3, 7, 8, 15, 20, 21, 38, 39]
    assert [note.split(":")[0] for note in found.notes] == ["head_dim", "rope_theta", "layer_ids", "block_size"]


def test_listed_layers_are_outputs(tmp_path: Path) -> None:
    listed = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    assert opened(eagle(tmp_path / "a", **listed)).config.layer_ids == (2, 3, 4)
    assert "layer_ids=[2, 3, 4], but layer_ids=[1, 2, 3] was given" in refused(tmp_path / "a", "layer_ids=[1,2,3]")
    # Outside eagle_config the same name has another meaning in vLLM.
    flat = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    assert "nobody knows" in refused(eagle(tmp_path / "b", **flat))
    assert opened(eagle(tmp_path / "b", **flat), "layer_ids=[2,3,4]").config.layer_ids == (2, 3, 4)


def test_layers_need_a_word_or_the_target(tmp_path: Path) -> None:
    assert "target_layers=N" in refused(eagle(tmp_path / "a"))
    assert opened(tmp_path / "a", "layer_ids=[1,3,4]").config.layer_ids == (1, 3, 4)
    with pytest.raises(CheckpointError, match=r"gives layers \[2, 3, 3\] of 6"):
        opened(tmp_path / "a", target=target_tables())


def test_draft_ids_in_any_order_are_sorted(tmp_path: Path) -> None:
    ids = [0, 1, 3, 7, 8, 15, 20, 21, 39, 38]
    found = opened(eagle(tmp_path, vocabulary(ids)), "layer_ids=[1,3,4]")
    rows = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    assert found.target_ids is not None
    assert found.head_rows is not None
    assert found.target_ids.tolist() == sorted(ids)
    assert torch.equal(found.head_rows, rows[[*range(8), 9, 8]])


def test_tables_of_a_full_vocabulary_must_be_those_of_identity(tmp_path: Path) -> None:
    """SpecForge writes `d2t` and `t2d` always."""
    shapes = eagle_shapes() | {"lm_head.weight": (V, H)}
    whole = random_tensors(shapes) | {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    found = opened(save(tmp_path / "a", EAGLE3 | {"draft_vocab_size": V}, whole), "layer_ids=[1,3,4]")
    assert found.target_ids is None
    assert found.head_rows is not None
    whole["d2t"][0], whole["d2t"][1] = 1, -1
    assert "reorders" in refused(save(tmp_path / "b", EAGLE3 | {"draft_vocab_size": V}, whole), "layer_ids=[1,3,4]")


def test_a_converted_drafter_drafts_with_its_own_head(tmp_path: Path) -> None:
    write(opened(eagle(tmp_path / "in"), "layer_ids=[1,3,4]", target=target_tables()), tmp_path / "out", "speculators", target_tables())
    loaded = load(tmp_path / "out")
    assert loaded.contract is not None
    assert loaded.target_ids is not None
    assert loaded.head_rows is not None
    drafter = Eagle3Drafter(loaded.config).eval()
    drafter.load_state_dict(loaded.tensors)
    session = EagleSession(drafter, target_tables().embed, loaded.head_rows, draft_to_target=loaded.target_ids, max_length=32)
    session.observe(torch.arange(6), torch.randn(6, 3 * H, generator=torch.Generator().manual_seed(3)))
    assert set(session.draft(9, 7).tokens) <= set(loaded.target_ids.tolist())


def test_round_trip_through_sglang_is_exact(tmp_path: Path) -> None:
    plain = replace(CONFIGS["eagle3"], extra=SAFEAI, draft_vocab_size=10, layer_ids=(1, 3, 4), block_size=7)
    toy_export(tmp_path / "ours", plain)
    write(opened(tmp_path / "ours"), tmp_path / "theirs", "sglang")
    data = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert data["architectures"] == ["LlamaForCausalLMEagle3"]
    assert data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    write(opened(tmp_path / "theirs"), tmp_path / "again", "speculators")
    first, second = load(tmp_path / "ours"), load(tmp_path / "again")
    assert second.config == first.config
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == load_file(tmp_path / "again" / "model.safetensors").keys()
    for key, tensor in load_file(tmp_path / "ours" / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[key], tensor), key


def test_what_sglang_has_no_words_for_is_refused(tmp_path: Path) -> None:
    toy_export(tmp_path / "ours", replace(CONFIGS["eagle3"], draft_vocab_size=10, layer_ids=(1, 3, 4)))
    with pytest.raises(CheckpointError, match="norm_before_residual is True, but the sglang layout of eagle3 has False"):
        write(opened(tmp_path / "ours"), tmp_path / "theirs", "sglang")


def test_deepspec_eagle3(tmp_path: Path) -> None:
    own = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2, 3, 4], "ttt_length": 5, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1}
    config = QWEN3 | own | {"num_hidden_layers": 1, "layer_types": ["full_attention"], "target_model_name_or_path": "acme/tiny-chat"}
    shapes = {"fc.weight": (H, 5 * H), "norm.weight": (H,), "layers.0.hidden_norm.weight": (H,), "embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
    found = opened(save(tmp_path, config, random_tensors(shapes | layer_shapes("layers.0.", width=2 * H))))
    assert found.config.layer_ids == (1, 2, 3, 4, 5)
    assert found.config.block_size == 5
    assert found.config.extra == SAFEAI | {"layer_style": "qwen3"}
    assert found.verifier == "acme/tiny-chat"


def test_a_name_with_two_meanings(tmp_path: Path) -> None:
    folder = eagle(tmp_path, norm_output=True)
    assert "two meanings" in refused(folder, "layer_ids=[1,3,4]")
    assert opened(folder, "layer_ids=[1,3,4]", "norm_output=false").config.extra["norm_output"] is False
