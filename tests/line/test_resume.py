"""Killed at any stage, a run resumes and ends with the same checkpoint; nothing that was finished is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from line_screen import QuietScreen
from safetensors.torch import load_file
from tiny_target import recipe_settings

from firesteel.artifact import hash_file
from firesteel.cli.runner import LINE, run_line
from firesteel.errors import ArtifactError, HiddenStateError, TrainingError
from firesteel.recipe import recipe_from_dict
from firesteel.stages.line import Line
from firesteel.training import step
from firesteel.training.metrics import read_metrics

MakeLine = Callable[..., Line]
STAGES = ["prompts", "responses", "hidden", "train", "calibrate", "package", "evaluate"]
QUICK = ("responses", "train", "evaluate")  # where most is lost, and the end; the others are in `make test-slow`
ROOT = Path(__file__).parent.parent.parent
STEPS = {"max_steps": 30, "validate_every": 10, "batch_tokens": 96, "anchors": 16, "lr": 3e-3, "compile": False, "checkpoint_minutes": 1e-6}


def test_training_resumes_bit_for_bit(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the middle, the loss curve and the weights are those of an undisturbed run."""
    whole = make_line(train=STEPS)
    for _, stage in LINE[:4]:
        stage(whole)
    wanted, curve = load_file(whole.folder / "train" / "best.safetensors"), _losses(whole.folder / "train")

    broken = make_line(train=STEPS)
    broken.recipe.name = "broken"
    for _, stage in LINE[:3]:
        stage(broken)
    real, calls = step.compute_loss, []

    def failing(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 18:
            raise RuntimeError("power cut")
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "compute_loss", failing)
    with pytest.raises(RuntimeError, match="power cut"):
        LINE[3][1](broken)
    assert not (broken.folder / "train").exists()
    monkeypatch.undo()
    LINE[3][1](broken)
    found = load_file(broken.folder / "train" / "best.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())
    assert _losses(broken.folder / "train") == curve


@pytest.fixture(scope="module")
def undisturbed(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """A whole run that nobody kills."""
    settings = recipe_settings(base_folder, train=STEPS) | {"runs_dir": str(tmp_path_factory.mktemp("undisturbed"))}
    line = Line(recipe_from_dict(settings), QuietScreen())
    run_line(line)
    return line


@pytest.mark.parametrize("moment", [pytest.param(s, marks=[] if s in QUICK else pytest.mark.slow) for s in STAGES])
def test_killed_at_any_stage_ends_the_same(base_folder: Path, tmp_path: Path, undisturbed: Line, moment: str) -> None:
    """kill -9 as soon as a stage's working folder appears; the same recipe then finishes, without making anything twice, and with the same package."""
    settings = recipe_settings(base_folder, train=STEPS) | {"runs_dir": str(tmp_path / "killed")}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "firesteel.cli.app", "run", str(path)]
    folder = tmp_path / "killed" / "tiny"
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (folder / f"{moment}.partial").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert process.wait() == -signal.SIGKILL, "it had ended before it was killed"
    assert (folder / f"{moment}.partial").is_dir()
    assert not (folder / moment).exists()
    resumed = Line(recipe_from_dict(settings), QuietScreen())
    run_line(resumed)
    said = resumed.screen.lines  # type: ignore[attr-defined]
    assert [text for text in said if text.endswith("up to date")] == [f"{name}: up to date" for name in STAGES[: STAGES.index(moment)]]
    package = folder / "package"
    assert hash_file(package / "model.safetensors") == hash_file(undisturbed.folder / "package" / "model.safetensors")
    assert json.loads((package / "config.json").read_text()) == json.loads((undisturbed.folder / "package" / "config.json").read_text())


def test_a_flipped_byte_is_found(make_line: MakeLine) -> None:
    line = make_line()
    for _, stage in LINE[:3]:
        stage(line)
    victim = next((line.folder / "hidden" / "samples").glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises((ArtifactError, HiddenStateError)) as e:
        LINE[3][1](line)
    assert victim.name in str(e.value)
    assert "run the stage again" in str(e.value)


def test_nan_losses_stop_training_with_its_state_kept(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line(train={**STEPS, "nonfinite_budget": 2})
    for _, stage in LINE[:3]:
        stage(line)
    real = step.compute_loss

    def poisoned(*args: object, **kwargs: object) -> object:
        result, confidence = real(*args, **kwargs)  # type: ignore[arg-type]
        result.loss = result.loss * float("nan")
        return result, confidence

    monkeypatch.setattr(step, "compute_loss", poisoned)
    with pytest.raises(TrainingError, match="nonfinite_budget"):
        LINE[3][1](line)
    assert (line.folder / "train.partial" / "state").is_dir()


def _losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl")]
