"""The whole line for a Qwen3.5 whose files carry an MTP head: fine-tuned, proven, stitched back, and where it may start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hybrid_target import save_hybrid_target
from line_screen import QuietScreen
from safetensors.torch import load_file, save_file
from tiny_target import recipe_settings, save_tiny_target, write_prompts
from transformers import AutoModelForCausalLM

from firesteel.cli.runner import LINE, run_line
from firesteel.decoding.decode import decode_plain, decode_speculative
from firesteel.drafters.mtp_format import from_native, mtp_keys
from firesteel.errors import RecipeError
from firesteel.evaluation.report import read_report
from firesteel.package.load import load
from firesteel.package.stitch import stitch
from firesteel.recipe import recipe_from_dict
from firesteel.stages.configure import preflight
from firesteel.stages.convert import convert_once
from firesteel.stages.line import Line
from firesteel.stages.runtime import open_package
from firesteel.stages.train import load_trained
from firesteel.target.native import read_native

MTP: dict[str, dict[str, object]] = {
    "drafter": {"algorithm": "mtp", "block_size": 3},
    "evaluate": {"temperatures": [0.0, 1.0]},
    "train": {"lr": 1e-3},
}


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("mtp")
    save_hybrid_target(folder / "target")
    write_prompts(folder / "train.jsonl", 24)
    write_prompts(folder / "eval.jsonl", 6, start=100)
    return folder


def make(folder: Path, runs: Path, **sections: dict[str, object]) -> Line:
    settings = recipe_settings(folder, **{k: {**MTP.get(k, {}), **sections.get(k, {})} for k in {*MTP, *sections}})
    target = dict(settings["target"])  # type: ignore[call-overload]
    if "layer_ids" not in sections.get("target", {}):
        del target["layer_ids"]
    return Line(recipe_from_dict({**settings, "target": target, "runs_dir": str(runs)}), QuietScreen())


def test_the_line_ends_with_a_head_that_is_stitched_back(mtp_folder: Path, tmp_path: Path) -> None:
    line = make(mtp_folder, tmp_path / "runs")
    run_line(line)
    assert line.layer_ids == (2,)
    report = read_report(line.folder / "report.json")
    assert report["acceptance_length"]["pooled"] >= 1
    proof = json.loads((line.folder / "package" / "manifest.json").read_text())["about"]["proof"]
    # Greedy answers: decoding the exported folder walks exactly the rounds that validation replayed.
    assert proof["decoded"] == pytest.approx(proof["promised"], abs=1e-9)
    card = (line.folder / "package" / "README.md").read_text()
    assert "firesteel stitch" in card
    assert '{"method": "mtp", "num_speculative_tokens"' in card

    package, out = line.folder / "package", tmp_path / "stitched"
    stitch(package, mtp_folder / "target", out)
    head, own, before = load(package).tensors, load_file(out / "model.safetensors"), load_file(mtp_folder / "target" / "model.safetensors")
    trained = [n for n in own if n.startswith("mtp.")]
    assert all(torch.equal(own[n], head[n]) for n in trained)
    assert any(not torch.equal(own[n], before[n]) for n in trained), "training changed nothing"
    assert all(torch.equal(own[n], before[n]) for n in own if n not in trained)
    ids = torch.arange(4, 14)[None]
    logits = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits for folder in (mtp_folder / "target", out)]
    assert torch.equal(*logits)
    # Drafted text is the target's own, whatever is drafted.
    runtime = open_package(line, package)
    for prompt in ([5, 9, 14], [7, 7, 30, 41, 8]):
        plain = decode_plain(runtime.target, prompt, max_new_tokens=20, eos_ids=(2,))
        drafted = decode_speculative(runtime.target, runtime.session, prompt, draft_tokens=3, max_new_tokens=20, eos_ids=(2,))
        assert drafted.tokens == plain.tokens

    # Training goes on from a package: its weights, the norm of the target at hand.
    more = make(mtp_folder, tmp_path / "more", train={"lr": 1e-12, "max_steps": 1}, drafter={"init": str(package)})
    for _, stage in LINE[:4]:
        stage(more)
    state = load_trained(more, "mtp").drafter.state_dict()
    assert all(torch.allclose(state[n], t, atol=1e-6) for n, t in head.items())

    # The copy is a target like any other: training may go on from its head.
    again = recipe_from_dict({"target": {"model": str(out)}, "train": {"max_steps": 1}})
    assert all(torch.equal(t, own[n]) for n, t in read_native(again.target, "mtp.").items())


def test_where_a_head_starts(mtp_folder: Path, tmp_path: Path) -> None:
    """A learning rate of nearly nothing shows the start; without a head in the files it is noise."""
    still = {"lr": 1e-12, "max_steps": 1}
    line = make(mtp_folder, tmp_path / "runs", train=still, drafter={"mtp": {"start": "native"}})
    for _, stage in LINE[:4]:
        stage(line)
    trained = load_trained(line, "mtp")
    native = from_native(read_native(line.recipe.target, "mtp."), mtp_keys(trained.config))
    state = trained.drafter.state_dict()
    assert all(torch.allclose(state[n], t, atol=1e-6) for n, t in native.items())
    torch.testing.assert_close(state["target_norm.weight"], line.target.norm_weight)

    bare = tmp_path / "bare"
    save_hybrid_target(bare, head=False)
    line = make(mtp_folder, tmp_path / "runs-bare", train=still, target={"model": str(bare)})
    for _, stage in LINE[:4]:
        stage(line)


def test_training_goes_on_from_a_head_in_speculators_layout(mtp_folder: Path, tmp_path: Path) -> None:
    """The target's native head under the peer's names, converted with its target: the new drafter begins as that head."""
    line, theirs = make(mtp_folder, tmp_path / "runs"), tmp_path / "theirs"
    native = read_native(line.recipe.target, "mtp.")
    names = {"fc.": "input_proj.", "norm.": "final_layernorm.", "pre_fc_norm_hidden.": "hidden_layernorm.", "pre_fc_norm_embedding.": "token_layernorm."}

    def renamed(name: str) -> str:
        own = name.removeprefix("mtp.").removeprefix("layers.0.")
        begin = next((b for b in names if own.startswith(b) and not name.startswith("mtp.layers.")), "")
        return f"mtp_layers.0.{names.get(begin, '')}{own.removeprefix(begin)}"

    theirs.mkdir()
    save_file({renamed(n): t for n, t in native.items()}, theirs / "model.safetensors")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    frame = {"algorithm": "mtp", "proposal_methods": [proposal], "verifier": {"name_or_path": None, "architectures": []}}
    layer = json.loads((mtp_folder / "target" / "config.json").read_text())
    config = {"speculators_model_type": "mtp", "speculators_config": frame, "transformer_layer_config": layer, "num_nextn_predict_layers": 1}
    (theirs / "config.json").write_text(json.dumps(config))

    convert_once(line, QuietScreen(), theirs, tmp_path / "ours", "speculators", [])
    more = make(mtp_folder, tmp_path / "more", drafter={"init": str(tmp_path / "ours")})
    assert preflight(more) == preflight(line)
    head = load(tmp_path / "ours")
    assert all(torch.equal(head.tensors[n], t) for n, t in native.items())
    torch.testing.assert_close(head.tensors["target_norm.weight"], line.target.norm_weight)


def test_what_cannot_be_is_refused_before_anything_is_spent(mtp_folder: Path, tmp_path: Path) -> None:
    save_hybrid_target(tmp_path / "bare", head=False)
    with pytest.raises(RecipeError, match=r"start=native, but the target's files hold no"):
        _ = make(mtp_folder, tmp_path, target={"model": str(tmp_path / "bare")}, drafter={"mtp": {"start": "native"}}).target
    with pytest.raises(RecipeError, match=r"init=target: an MTP head begins with"):
        _ = make(mtp_folder, tmp_path, drafter={"init": "target"}).target
    with pytest.raises(RecipeError, match=r"layer_ids=\[0, 1\] lacks 2"):
        _ = make(mtp_folder, tmp_path, target={"layer_ids": [0, 1]}).layer_ids
    save_tiny_target(tmp_path / "llama")
    with pytest.raises(RecipeError, match=r"algorithm=mtp: no MTP head is known for targets of model type 'llama'"):
        _ = make(mtp_folder, tmp_path, target={"model": str(tmp_path / "llama")}).target
