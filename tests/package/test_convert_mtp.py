"""MTP heads as speculators 0.9.0 takes them out of a model's files: read together with the target, and ours go there by the peer's own converter."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_cases import opened, refused
from mtp_package import LAYERS, export_head, save_target, text_config
from package_toys import TARGET, edit
from safetensors.torch import load_file, save_file
from torch import Tensor

from firesteel.errors import CheckpointError
from firesteel.package.convert.convert import TargetTables, write
from firesteel.package.load import LoadedDraft, load
from firesteel.package.stitch import stitch

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".venv-peers" / "bin" / "python"
# Names that the peer's converter publishes (speculators/convert/mtp).
THEIRS = {"fc": "input_proj", "norm": "final_layernorm", "pre_fc_norm_hidden": "hidden_layernorm", "pre_fc_norm_embedding": "token_layernorm"}


def their_name(name: str) -> str:
    first, _, rest = name.removeprefix("mtp.").partition(".")
    return f"mtp_layers.0.{THEIRS[first]}.{rest}" if first in THEIRS else f"mtp_layers.0.{rest.removeprefix('0.')}"


def their_tensors(package: LoadedDraft) -> dict[str, Tensor]:
    return {their_name(name): tensor for name, tensor in package.tensors.items() if name != "target_norm.weight"}


def their_folder(folder: Path, package: LoadedDraft, *, moe: bool = False) -> Path:
    """A checkpoint with the fields and names that the peer writes; its unused table is never filled."""
    folder.mkdir()
    frame = {
        "algorithm": "mtp",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["Qwen3_5ForCausalLM"], "name_or_path": "acme/tiny-chat"},
    }
    config = {
        "architectures": ["MTPDraftModel"],
        "auto_map": {"": "config.MTPSpeculatorConfig"},
        "dtype": "float32",
        "num_nextn_predict_layers": 1,
        "speculators_config": frame,
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "transformer_layer_config": text_config(moe=moe).to_diff_dict(),
        "transformers_version": "5.19.0",
    }
    (folder / "config.json").write_text(json.dumps(config))
    unused = {"verifier_lm_head.weight": torch.full((40, 32), float("nan"))}
    save_file({name: t.clone() for name, t in (their_tensors(package) | unused).items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tables(package: LoadedDraft, **changes: Any) -> TargetTables:
    spec = replace(TARGET, num_layers=LAYERS, hidden_size=32, vocab_size=40, norm_offset=1.0, **changes)
    return TargetTables(spec, torch.zeros(40, 32), torch.zeros(40, 32), lambda: package.tensors["target_norm.weight"])


def check_same(folder: Path, package: LoadedDraft, out: Path) -> None:
    """Converted with its target, a peer's head is ours again, bit for bit, and says the same of itself."""
    target = tables(package)
    write(opened(folder, target=target), out, "speculators", target)
    found = load(out)
    wishes = {"beta": package.config.extra["beta"]}
    assert replace(found.config, extra=found.config.extra | wishes) == package.config
    assert found.tensors.keys() == package.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in package.tensors.items())
    assert found.contract is not None
    assert found.contract.promise is None


def made(root: Path, *, moe: bool = False) -> LoadedDraft:
    return load(export_head(root / "package", save_target(root / "target", moe=moe), moe=moe))


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
def test_a_head_of_the_peers_is_read_with_its_target(moe: bool, tmp_path: Path) -> None:
    package = made(tmp_path, moe=moe)
    check_same(their_folder(tmp_path / "theirs", package, moe=moe), package, tmp_path / "out")


def test_without_its_target_it_is_refused_for_what_it_lacks(tmp_path: Path) -> None:
    package = made(tmp_path)
    theirs = their_folder(tmp_path / "theirs", package)
    message = refused(theirs)
    assert "leaves out the final norm of its target" in message
    assert "--target" in message
    with pytest.raises(CheckpointError, match=r"MTP in speculators' layout leaves out the final norm.*\n?.*firesteel convert"):
        load(theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"speculators_config.algorithm": "eagle3"}, "speculators_model_type is 'mtp', speculators_config.algorithm is 'eagle3'"),
        ({"transformer_layer_config.model_type": "mamba"}, "no MTP head is known for targets of model type 'mamba'"),
        ({"transformer_layer_config.vocab_size": None}, "transformer_layer_config.vocab_size is None"),
        ({"transformer_layer_config.num_hidden_layers": 6}, "number of layers is 6, that of acme/tiny-chat is 4"),
        ({"transformer_layer_config.residual_scale": 0.5}, "ignore=[transformer_layer_config.residual_scale]"),
        ({"transformer_layer_config.intermediate_size": 64}, "mtp.layers.0.mlp."),
        ({"transformer_layer_config.rope_parameters.rope_type": "dynamic"}, "'dynamic'"),
        ({"step_bias": 1}, "ignore=[step_bias]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_it_is_said(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    package = made(tmp_path)
    theirs = their_folder(tmp_path / "theirs", package)
    edit(theirs / "config.json", change)
    assert words in refused(theirs, target=tables(package))


def test_its_tensors_are_read_strictly(tmp_path: Path) -> None:
    package = made(tmp_path)
    theirs = their_folder(tmp_path / "theirs", package)
    whole = load_file(theirs / "model.safetensors")
    for change, drop, words in (
        ({}, "mtp_layers.0.input_proj.weight", "lacks mtp.fc.weight"),
        ({"mtp_layers.1.input_proj.weight": torch.zeros(2)}, "", "holds mtp_layers.1.input_proj.weight"),
        ({"mtp_layers.0.final_layernorm.weight": torch.full((32,), float("nan"))}, "", "mtp.norm.weight is not finite"),
        ({"mtp_layers.0.final_layernorm.weight": torch.zeros(32).half()}, "", "mtp.norm.weight is torch.float16"),
    ):
        save_file({n: t for n, t in (whole | change).items() if n != drop}, theirs / "model.safetensors")
        assert words in refused(theirs, target=tables(package))


@pytest.mark.parity
@pytest.mark.skipif(not PEER.is_file(), reason="the peer's environment .venv-peers is not there: build it with `make bench-peers`")
def test_ours_goes_to_the_peer_and_comes_back(tmp_path: Path) -> None:
    """The peer's own converter reads the folder that `stitch` wrote and opens what it made of it; the same head comes back from there."""
    packages, words = {}, []
    for name in ("dense", "experts"):
        folder = tmp_path / name
        packages[name] = made(folder, moe=name == "experts")
        stitch(folder / "package", folder / "target", folder / "stitched")
        words += [str(folder / "stitched"), str(folder / "theirs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(PEER), str(Path(__file__).with_name("peer_mtp_convert.py")), "3", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for name, package in packages.items():
        theirs = load_file(tmp_path / name / "theirs" / "model.safetensors")
        for key, tensor in their_tensors(package).items():
            assert torch.equal(theirs[key], tensor), key
        assert {key for key in theirs if key.startswith("mtp_layers.")} == their_tensors(package).keys()
        check_same(tmp_path / name / "theirs", package, tmp_path / name / "back")
