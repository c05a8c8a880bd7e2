"""The whole line with latent attention: trained, exported as vLLM's `k3_dspark`, loaded, proven and measured."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from firesteel.cli.runner import run_line
from firesteel.evaluation.report import read_report
from firesteel.stages.line import Line


def test_a_drafter_with_latent_attention_walks_the_line(make_line: Callable[..., Line]) -> None:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    line = make_line(drafter={"backbone": "mla", "mla": sizes, "block_size": 4, "num_layers": 1, "markov_rank": 8}, train={"optimizer": "muon"})
    run_line(line)
    assert read_report(line.folder / "report.json")["acceptance_length"]["pooled"] >= 1
    assert json.loads((line.folder / "package" / "config.json").read_text())["model_type"] == "k3_dspark"
    proof = json.loads((line.folder / "package" / "manifest.json").read_text())["about"]["proof"]
    # Greedy answers: decoding the exported folder walks exactly the rounds that validation replayed.
    assert proof["decoded"] == pytest.approx(proof["promised"], abs=1e-9)
