"""The whole line on a tiny random model: artifacts, skipping, proof, report; every algorithm and store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from firesteel.cli.runner import LINE, run_line
from firesteel.errors import FiresteelError
from firesteel.evaluation.report import read_report
from firesteel.prompts.template import encode_prompt
from firesteel.stages import prompts as prompts_stage
from firesteel.stages import respond
from firesteel.stages.line import Line
from firesteel.training.metrics import read_metrics

MakeLine = Callable[..., Line]


def test_the_line_ends_with_a_proven_package_and_a_report(make_line: MakeLine) -> None:
    line = make_line(evaluate={"compare": ["dflash"], "temperatures": [0.0, 1.0]})
    run_line(line)
    report = read_report(line.folder / "report.json")
    assert report["acceptance_length"]["pooled"] >= 1
    assert report["speedup"]["pooled"] > 0
    assert set(report["drafters"]) == {"dspark", "dflash"}
    assert {row["temperature"] for row in report["temperatures"]} == {0.0, 1.0}
    assert report["seconds_total"] > 0
    assert (line.folder / "report.html").is_file()
    card = (line.folder / "package" / "README.md").read_text()
    assert f"| {report['acceptance_length']['pooled']:.2f} |" in card
    assert f"| {report['speedup']['pooled']:.2f}x |" in card
    stored = json.loads((line.folder / "package" / "firesteel.json").read_text())["contract"]["calibration"]
    for kept, measured in zip(stored["positions"], report["calibration"]["positions"], strict=True):
        assert kept == {name: measured[name] for name in kept}
    assert stored["measured_on"] == report["calibration"]["measured_on"]
    assert f"| mean | | {report['calibration']['ece_before']:.3f} | {report['calibration']['ece_after']:.3f} | {report['confidence']['ece']:.3f} |" in card
    proof = json.loads((line.folder / "package" / "manifest.json").read_text())["about"]["proof"]
    # Greedy answers: decoding the exported folder walks exactly the rounds that validation replayed.
    assert proof["decoded"] == pytest.approx(proof["promised"], abs=1e-9)


def test_a_second_run_does_nothing_again(make_line: MakeLine) -> None:
    first = make_line()
    run_line(first)
    created = {n: (first.folder / n / "manifest.json").stat().st_mtime_ns for n in _stages(first.folder)}
    second = make_line()
    run_line(second)
    assert {n: (second.folder / n / "manifest.json").stat().st_mtime_ns for n in _stages(second.folder)} == created
    third = make_line(train={"lr": 1e-3})
    run_line(third)
    again = {n for n in _stages(third.folder) if (third.folder / n / "manifest.json").stat().st_mtime_ns != created[n]}
    assert again == {"train", "calibrate", "package", "evaluate"}


def test_answers_are_the_targets_own(make_line: MakeLine) -> None:
    """Greedy answers equal Transformers' own generate, turn by turn."""
    line = make_line()
    prompts_stage.run(line)
    respond.run(line)
    model = AutoModelForCausalLM.from_pretrained(line.recipe.target.model, dtype=torch.float32).eval()
    prompts = {p.key: p for p in prompts_stage.read_prompts(line.input("prompts"), "train")}
    for answered in respond.read_responses(line.input("responses"), "train")[:6]:
        prompt, messages = prompts[answered.prompt_key], []
        for turn in answered.turns:
            ids = torch.tensor([encode_prompt(line.target.tokenizer, prompt.history(messages), prompt.tools)])
            wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
            assert turn.token_ids == wanted
            assert turn.finish_reason == ("stop" if wanted[-1] == 2 else "length")
            messages.append(turn.message())


@pytest.mark.parametrize(
    "sections",
    [
        {"drafter": {"algorithm": "dflash"}},
        {"drafter": {"markov_head": "gated", "attention": "sliding", "sliding_window": 16}},
        {"drafter": {"markov_head": "rnn", "confidence_with_markov": False, "sample_from_anchor": False}},
        {
            "drafter": {"draft_vocab_size": 40, "num_layers": 2, "attention": "mixed", "sliding_window": 16, "init": "target", "carry": True},
            "hidden": {"codec": "fp8"},
        },
        {
            "hidden": {"store": "memory", "codec": "bf16"},
            "train": {"optimizer": "muon", "accumulate": 2},
            "loss": {"position_weights": "dpace", "warm_kl": 0.5},
        },
        {"drafter": {"algorithm": "eagle3", "init": "target", "eagle": {"norm_output": True}}, "evaluate": {"temperatures": [0.0, 1.0]}},
        {"drafter": {"algorithm": "eagle3", "draft_vocab_size": 40, "num_layers": 2, "eagle": {"layer_style": "qwen3"}}},
        {"drafter": {"algorithm": "peagle"}, "evaluate": {"compare": ["eagle3", "dspark"]}},
        {"target": {"dtype": "bfloat16"}, "drafter": {"draft_vocab_size": 40, "init": "target"}, "evaluate": {"compare": ["eagle3", "peagle"]}},
        {"target": {"dtype": "bfloat16"}, "hidden": {"codec": "bf16"}, "drafter": {"algorithm": "dflash2"}},
        # Exact states: so few drafts are accepted here that one lost to rounding would be a large share.
        {"responses": {"temperature": 1.0, "samples": 2}, "hidden": {"precision": "float32"}, "loss": {"ce": 0.1, "tv": 0.9}},
    ],
    ids=[
        "dflash",
        "gated-sliding",
        "rnn-fill-in",
        "reduced-mixed-fp8",
        "memory-muon-dpace",
        "eagle3",
        "eagle3-reduced",
        "peagle-beside-others",
        "half-target",
        "half-target-dflash2",
        "sampled",
    ],
)
def test_variants_walk_the_line(make_line: MakeLine, sections: dict[str, dict[str, object]]) -> None:
    line = make_line(**sections)
    run_line(line)
    assert read_report(line.folder / "report.json")["acceptance_length"]["pooled"] >= 1


def test_training_teaches(make_line: MakeLine) -> None:
    """More steps on a few documents that repeat: validation rises well above an untrained drafter's."""
    line = make_line(train={"max_steps": 250, "validate_every": 50, "lr": 5e-3})
    for _, stage in LINE[:4]:
        stage(line)
    curve = [r["acceptance_length"] for r in read_metrics(line.folder / "train" / "metrics.jsonl") if r["kind"] == "validation"]
    losses = [r["loss"] for r in read_metrics(line.folder / "train" / "metrics.jsonl") if r["kind"] == "train"]
    assert max(curve) > 1.2
    assert losses[-1] < 0.6 * losses[0]


def test_a_stage_without_its_input_says_what_to_run(make_line: MakeLine) -> None:
    line = make_line()
    with pytest.raises(FiresteelError, match="run the stage before"):
        respond.run(line)


def _stages(folder: Path) -> list[str]:
    return sorted(p.parent.name for p in folder.glob("*/manifest.json"))
