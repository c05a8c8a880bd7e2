"""speculators 0.9.0 itself opens what is exported: no key missing, none unexpected, the same weights and the same configuration."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from package_toys import CONFIGS, EAGLES, toy_export
from transformers import LlamaConfig, LlamaForCausalLM

from firesteel.drafters.registry import get_spec

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".venv-peers" / "bin" / "python"

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PEER.is_file(), reason="the peer's environment .venv-peers is not there: build it with `make bench-peers`"),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What the peer says, and config.json, for each toy."""
    root = tmp_path_factory.mktemp("parity")
    target = LlamaConfig(vocab_size=40, hidden_size=24, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    LlamaForCausalLM(target).save_pretrained(root / "target")
    for name, config in CONFIGS.items():
        # A `pypi:` target has no name for others, so the peer does not go looking for its weights; its EAGLE insists on a target.
        named = str(root / "target") if name in EAGLES else "pypi:tiny"
        toy_export(root / name, config, torch.bfloat16 if name == "vanilla" else torch.float32, target_name=named)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(PEER), str(Path(__file__).with_name("peer_open.py")), *(str(root / name) for name in CONFIGS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line.removeprefix("PEER ")) for line in done.stdout.splitlines() if line.startswith("PEER ")]
    return {name: (line, json.loads((root / name / "config.json").read_text())) for name, line in zip(CONFIGS, lines, strict=True)}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_peer_opens_it_strictly(name: str, opened: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    said, _ = opened[name]
    assert said["class"] == get_spec(CONFIGS[name].algorithm).architecture
    assert all(not found for found in said["loading"].values()), said["loading"]
    assert said["lacking"] == []
    assert said["different"] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_the_peer_reads_the_same_configuration(name: str, opened: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    said, written = opened[name]
    config = CONFIGS[name]
    theirs, ours = dict(said["config"]), dict(written)
    layers = theirs.pop("transformer_layer_config")
    for field, value in ours.pop("transformer_layer_config").items():
        # The peer leaves out what equals Qwen3's default; a null is a default.
        assert layers.get(field) == value, field
    for field, value in ours.items():
        assert theirs[field] == value, field
    assert said["sliding"] == [i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
    assert said["window"] == (16 if said["sliding"] else None)
    if config.algorithm in ("dspark", "dflash"):
        assert said["non_causal"] is not config.causal
    scale = config.rope_scaling["factor"] if config.rope_scaling else 1.0
    assert said["rope"] == pytest.approx([5000.0 ** (-i / 4) / scale for i in range(4)], rel=1e-5)
