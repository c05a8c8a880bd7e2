"""Stitching an MTP head into its target's files: everything else keeps its bits, other shapes and targets are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_package import export_head, head_tensors, make_head_config, save_target
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from firesteel.drafters.mtp_format import native_tensor
from firesteel.errors import CheckpointError
from firesteel.package.load import load
from firesteel.package.stitch import stitch


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check(folder: Path, target: Path, package: Path) -> None:
    """Non-mtp tensors are the target's bits, the others are the drafter's in the files' precision."""
    before, after, state = tensors_of(target), tensors_of(folder), load(package).tensors
    assert {n for n in before if not n.startswith("mtp.")} == {n for n in after if not n.startswith("mtp.")}
    heads = 0
    for name, tensor in after.items():
        if name.startswith("mtp."):
            found = native_tensor(name, state)
            assert found is not None
            assert torch.equal(tensor, found[1].to(tensor.dtype)), name
            heads += 1
        else:
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    assert heads >= 15


@pytest.mark.parametrize("layout", ["single", "sharded", "sharded-bf16", "experts-single"])
def test_replacing_keeps_every_other_bit(layout: str, tmp_path: Path) -> None:
    moe = layout == "experts-single"
    target = save_target(tmp_path / "target", moe=moe, sharded="sharded" in layout, dtype=torch.bfloat16 if "bf16" in layout else torch.float32)
    package = export_head(tmp_path / "package", target, moe=moe)
    done = stitch(package, target, tmp_path / "out")
    assert (done.replaced > 0, done.added) == (True, 0)
    check(done.folder, target, package)
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]
    files = {p.name for p in target.iterdir()}
    assert files == {p.name for p in done.folder.iterdir()}
    if "sharded" in layout:
        index = json.loads((done.folder / "model.safetensors.index.json").read_text())
        assert index == json.loads((target / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            with safe_open(done.folder / file, framework="pt") as f:
                assert name in f.keys()  # noqa: SIM118
    AutoModelForCausalLM.from_pretrained(done.folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_head_is_added_where_there_is_none(sharded: bool, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", head=False, sharded=sharded, moe=True)
    package = export_head(tmp_path / "package", target, moe=True)
    done = stitch(package, target, tmp_path / "out")
    assert (done.replaced, done.added > 0) == (0, True)
    check(done.folder, target, package)
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(done.folder).keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors_of(done.folder).values())
    assert json.loads((done.folder / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    AutoModelForCausalLM.from_pretrained(done.folder)


def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    package = export_head(tmp_path / "package", target)

    def refused(words: str, changed: dict[str, Tensor | None], name: str) -> None:
        other = save_target(tmp_path / name)
        tensors: dict[str, Any] = {**load_file(other / "model.safetensors"), **changed}
        save_file({n: t for n, t in tensors.items() if t is not None}, other / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            stitch(package, other, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    config = make_head_config()
    wide = torch.zeros(config.hidden_size, 3 * config.hidden_size)
    refused(r"mtp.fc.weight has shape \[32, 64\] in the drafter, \[32, 96\]", {"mtp.fc.weight": wide}, "wide")
    refused("mtp.fc.weight_scale, which the drafter does not know", {"mtp.fc.weight_scale": torch.ones(1)}, "scaled")
    refused("without mtp.norm.weight", {"mtp.norm.weight": None}, "short")
    refused("stored as F8_E4M3", {"mtp.fc.weight": head_tensors(config)["mtp.fc.weight"].to(torch.float8_e4m3fn)}, "quantised")
    refused("its final norm .* differs", {"model.norm.weight": torch.zeros(config.hidden_size)}, "foreign")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        stitch(package, target, tmp_path / "there")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        stitch(package, tmp_path / "there", tmp_path / "out")


def test_a_package_is_read_as_it_was_written_and_edits_are_refused(tmp_path: Path) -> None:
    package = export_head(tmp_path / "package", save_target(tmp_path / "target", moe=True), moe=True)
    loaded = load(package)
    assert loaded.config == make_head_config(moe=True)
    assert loaded.speculative_tokens == 2
    file = package / "config.json"
    written = json.loads(file.read_text())
    for change, words in (
        ({"block_size": 5}, "block_size is 3 in .*5 in"),
        ({"num_speculative_tokens": 9}, "speculative_tokens is 9, but a block of 3 slots"),
        ({"text_config": {**written["text_config"], "num_experts_per_tok": 1}}, "extra is .* in "),
        ({"text_config": {**written["text_config"], "model_type": "llama"}}, "model type 'llama'"),
        ({"layer_ids": [3]}, r"layer_ids is \(4,\) in"),
    ):
        file.write_text(json.dumps({**written, **change}))
        with pytest.raises(CheckpointError, match=words):
            load(package)
