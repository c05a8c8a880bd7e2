"""Checkpoints of drafters with latent attention: what is exported comes back, and is what vLLM's own configuration class takes."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from package_toys import DSPARK, TARGET, edit, make_state, toy_contract, toy_export
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config

from firesteel.drafters.registry import get_spec
from firesteel.errors import CheckpointError
from firesteel.package.card import limits, model_card, speculative_config
from firesteel.package.load import check_target, load

LATENT = replace(
    DSPARK,
    num_kv_heads=4,
    head_dim=4,
    extra={"backbone": "mla", "q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "v_head_dim": 5},
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 1.0}
CONFIGS = {
    "plain": LATENT,
    "yarn": replace(LATENT, rope_scaling=YARN),
    "no-confidence": replace(LATENT, confidence_head=False),
    "blind-confidence": replace(LATENT, confidence_with_markov=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_exact(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = CONFIGS[name]
    written = toy_export(tmp_path, config, dtype)
    loaded, state = load(tmp_path), make_state(config)
    assert loaded.config == config
    assert loaded.contract == toy_contract(config)
    assert (loaded.dtype, loaded.speculative_tokens, loaded.target_ids, loaded.head_rows, loaded.embed) == (dtype, 4, None, None, None)
    assert loaded.tensors.keys() == state.keys()
    for key, tensor in loaded.tensors.items():
        assert torch.equal(tensor, state[key].to(torch.float32 if key.startswith("confidence_head") else dtype)), key
    assert written.parameters == sum(t.numel() for t in state.values())
    drafter = get_spec("dspark").build(config)
    drafter.load_state_dict(loaded.tensors)  # names and shapes are the module's own
    check_target(loaded, TARGET.fingerprint, 24, 40)


def test_fewer_drafts_than_slots_may_be_served(tmp_path: Path) -> None:
    toy_export(tmp_path, LATENT, speculative_tokens=2)
    assert load(tmp_path).speculative_tokens == 2


def test_it_opens_without_firesteels_own_file(tmp_path: Path) -> None:
    toy_export(tmp_path, CONFIGS["yarn"], torch.bfloat16)
    (tmp_path / "firesteel.json").unlink()
    edit(tmp_path / "config.json", {}, drop=("num_speculative_tokens", "is_causal", "target_num_hidden_layers", "sample_from_anchor"))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": torch.zeros(40, 24, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert loaded.config == CONFIGS["yarn"]
    assert loaded.contract is None
    assert loaded.speculative_tokens == 4
    assert loaded.embed is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla_use_nope": True}, "mla_use_nope"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"mla_use_qk_norm": True}, "mla_use_qk_norm"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        ({"markov_head_type": "rnn"}, "markov_head_type"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"fc_norm": True}, "fc_norm"),
        ({"draft_vocab_size": 20}, "whole vocabulary"),
        ({"num_target_layers": 2}, "num_target_layers is 2"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "YaRN|no RoPE"),
        ({"num_speculative_tokens": 5}, "speculative_tokens is 5"),
        ({"target_layer_ids": [0, 2, 4]}, "layer_ids is"),
        ({"kv_lora_rank": 9}, "extra is"),
        ({"dtype": None}, "dtype is missing"),
    ],
)
def test_what_does_not_hold_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    toy_export(tmp_path, LATENT)
    edit(tmp_path / "config.json", change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_config_json_has_what_vllm_reads(tmp_path: Path) -> None:
    """As of vLLM 0.32.0: the checks of `K3DSparkConfig`, what `dspark_mla.py` and the DSpark runner read, and the layers' convention."""
    toy_export(tmp_path, CONFIGS["yarn"], torch.bfloat16)
    data = json.loads((tmp_path / "config.json").read_text())
    assert (data["model_type"], data["architectures"], data["dtype"]) == ("k3_dspark", ["K3DSparkModel"], "bfloat16")
    # A frame of the speculators format would send vLLM to another class.
    assert not {"speculators_config", "speculators_model_type"} & data.keys()
    assert not any(data[name] for name in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor"))
    assert data["q_lora_rank"] == 10
    assert data["draft_vocab_size"] == data["vocab_size"] == 40
    assert data["num_target_layers"] == len(data["target_layer_ids"]) == 3
    assert [i + 1 for i in data["target_layer_ids"]] == [1, 3, 6]
    assert (data["target_hidden_size"], data["target_num_hidden_layers"]) == (24, 6)
    assert (data["mask_token_id"], data["block_size"], data["markov_rank"], data["is_causal"]) == (39, 4, 6, False)
    assert data["rope_parameters"] == {**YARN, "rope_theta": 5000.0}
    known = DeepseekV3Config(**{k: v for k, v in data.items() if k not in ("model_type", "architectures", "dtype")})
    assert (known.qk_head_dim, known.kv_lora_rank, known.v_head_dim, known.n_routed_experts) == (10, 8, 5, 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_vllms_own_class_takes_it(name: str, tmp_path: Path) -> None:
    """Its constructor raises where a field is missing or turns on what it does not serve."""
    try:
        theirs = importlib.import_module("vllm.transformers_utils.configs.k3_dspark").K3DSparkConfig
    except ImportError as e:
        pytest.skip(f"vLLM is not installed ({e}): config.json is checked field by field only")
    toy_export(tmp_path, CONFIGS[name])
    config = theirs.from_pretrained(tmp_path)
    assert config.model_type == "k3_dspark"
    assert (config.num_target_layers, config.draft_vocab_size, config.qk_rope_head_dim) == (3, 40, 4)
    edit(tmp_path / "config.json", {"mla_use_nope": True})
    with pytest.raises(ValueError, match="mla_use_nope"):
        theirs.from_pretrained(tmp_path)


def test_how_to_serve_it(tmp_path: Path) -> None:
    contract = toy_contract(LATENT)
    card = model_card(LATENT, contract, numbers=None, training=None, exported=toy_export(tmp_path, LATENT))
    assert "library_name: vllm" in card
    assert "- speculators" not in card  # that package does not open the folder
    assert speculative_config(LATENT, contract, "x")["method"] == "dspark"
    assert any("k3_dspark" in line for line in limits(LATENT, contract))
    assert not any("k3_dspark" in line for line in limits(DSPARK, toy_contract(DSPARK)))
