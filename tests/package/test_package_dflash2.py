"""DFlash2 checkpoints: round trip, config.json, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from package_toys import DFLASH, edit, make_state, toy_contract, toy_export

from firesteel.drafters.config import SLIDING
from firesteel.drafters.registry import get_spec
from firesteel.errors import CheckpointError
from firesteel.package.card import limits, speculative_config
from firesteel.package.load import load

OWN = {"kernel": 3, "group": 8, "rank": 6, "top_k": 5, "selector_loss": 0.25}
DFLASH2 = replace(DFLASH, algorithm="dflash2", extra=OWN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip_is_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    toy_export(tmp_path, DFLASH2, dtype)
    loaded = load(tmp_path)
    assert loaded.config == DFLASH2
    state = make_state(DFLASH2)
    assert loaded.tensors.keys() == state.keys()
    assert all(torch.equal(tensor, state[name].to(dtype)) for name, tensor in loaded.tensors.items())
    get_spec("dflash2").build(loaded.config).load_state_dict({k: v.float() for k, v in loaded.tensors.items()})


def test_config_json_says_what_servers_read(tmp_path: Path) -> None:
    toy_export(tmp_path, DFLASH2)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["architectures"] == ["DFlash2DraftModel"]
    assert data["speculators_model_type"] == data["speculators_config"]["algorithm"] == "dflash2"
    assert {k: data[k] for k in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")} == {
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 5,
    }
    assert data["sliding_window_non_causal"] is True
    assert not {"selector_loss", "extra", "dflash2"} & data.keys()
    contract = toy_contract(DFLASH2)
    assert speculative_config(DFLASH2, contract, "HERE")["method"] == "dflash"
    assert any("V2 model runner" in line for line in limits(DFLASH2, contract))
    anchored = replace(DFLASH2, sample_from_anchor=True)
    assert any("refuses a DFlash drafter that samples from the anchor slot" in line for line in limits(anchored, toy_contract(anchored)))


def test_a_foreign_checkpoint_needs_no_training_settings(tmp_path: Path) -> None:
    toy_export(tmp_path, DFLASH2)
    (tmp_path / "firesteel.json").unlink()
    edit(tmp_path / "config.json", {}, drop=("sliding_window_non_causal",))
    loaded = load(tmp_path)
    assert loaded.config == replace(DFLASH2, extra={k: v for k, v in OWN.items() if k != "selector_loss"}, sliding_window=loaded.config.sliding_window)
    get_spec("dflash2").build(loaded.config).load_state_dict(loaded.tensors)


@pytest.mark.parametrize(
    ("change", "drop", "message"),
    [
        ({}, ("selector_top_k",), "selector_top_k"),
        ({"conv_group_size": 7}, (), "group=7 does not divide"),
        ({"selector_rank": 0}, (), r"dflash2\.rank"),
        ({"conv_kernel_size": 2}, (), "extra is"),
        ({"draft_vocab_size": 20}, (), "whole vocabulary"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], drop: tuple[str, ...], message: str, tmp_path: Path) -> None:
    toy_export(tmp_path, DFLASH2)
    edit(tmp_path / "config.json", change, drop=drop)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_sliding_drafter_stays_bidirectional(tmp_path: Path) -> None:
    config = replace(DFLASH2, layer_types=(SLIDING, SLIDING), sliding_window=16)
    toy_export(tmp_path, config)
    (tmp_path / "firesteel.json").unlink()
    edit(tmp_path / "config.json", {}, drop=("sliding_window_non_causal", "transformer_layer_config.is_causal"))
    assert load(tmp_path).config.causal is False
