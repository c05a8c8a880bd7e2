"""`firesteel train` under torchrun: one artifact, made together; a killed rank costs the steps since the last state, no more."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from line_screen import QuietScreen
from tiny_target import recipe_settings

from firesteel.cli.runner import LINE
from firesteel.errors import RecipeError
from firesteel.recipe import recipe_from_dict
from firesteel.stages.evaluate import gather_requests
from firesteel.stages.line import Line
from firesteel.stages.ranks import joined
from firesteel.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent.parent
STEPS = {"max_steps": 16, "validate_every": 8, "batch_tokens": 96, "anchors": 16, "lr": 3e-3, "compile": False, "checkpoint_minutes": 1e-6}


def torchrun(recipe: Path, *arguments: str, verb: str = "train") -> list[str]:
    """Two processes of this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return [*start, "-m", "firesteel.cli.app", verb, str(recipe)]


def prepared(base_folder: Path, folder: Path, **train: object) -> tuple[Path, Line]:
    """A recipe whose hidden states are there."""
    settings = recipe_settings(base_folder, train={**STEPS, **train}) | {"runs_dir": str(folder / "runs")}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    line = Line(recipe_from_dict(settings), QuietScreen())
    for _, stage in LINE[:3]:
        stage(line)
    return path, line


@pytest.mark.slow
def test_two_processes_make_one_artifact(base_folder: Path, tmp_path: Path) -> None:
    recipe, line = prepared(base_folder, tmp_path, parallel="fsdp")
    done = subprocess.run(torchrun(recipe), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("train: done") == 1, "one process speaks"
    about = json.loads((line.folder / "train" / "manifest.json").read_text())["about"]
    assert (about["steps"], about["processes"]) == (16, 2)
    assert not (line.folder / "train" / "state").exists()
    # Calibrated and measured by two, to the figures of one; packaged by one, which finds what was promised.
    stages = dict(LINE)
    together(recipe, "calibrate")
    shutil.move(line.folder / "calibrate", tmp_path)
    stages["calibrate"](line)
    assert (line.folder / "calibrate" / "calibration.json").read_text() == (tmp_path / "calibrate" / "calibration.json").read_text()
    stages["package"](line)
    together(recipe, "evaluate")
    assert [p.name for p in (line.folder / "evaluate").glob("requests*")] == ["requests.jsonl"]
    shared, card = report(line), (line.folder / "package" / "README.md").read_text()
    assert shared["acceptance_length"]["requests"] > 2
    assert "one prompt at a time" in card, "the card has what was measured"
    shutil.move(line.folder / "evaluate", tmp_path)
    stages["evaluate"](line)
    alone = report(line)
    for part in ("acceptance_length", "positions", "calibration", "confidence"):
        assert shared[part] == alone[part], part
    assert {k: d["acceptance_length"] for k, d in shared["domains"].items()} == {k: d["acceptance_length"] for k, d in alone["domains"].items()}


def test_what_killed_processes_measured_is_kept_once(tmp_path: Path) -> None:
    """Records of several processes, some already gathered, one torn."""
    rows = [{"step": 0, "part": "", "record": {"prompt_id": str(i)}} for i in range(4)]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:2]))
    (tmp_path / "requests-1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[1:3]) + '{"step": 0, "par')
    (tmp_path / "requests-2.jsonl").write_text(json.dumps(rows[3]) + "\n")
    gather_requests(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["requests.jsonl"]
    assert sorted(read_metrics(tmp_path / "requests.jsonl"), key=str) == rows


def test_fewer_processes_calibrate_than_trained(base_folder: Path, tmp_path: Path) -> None:
    """`train.context_ranks` is training's alone."""
    _, line = prepared(base_folder, tmp_path, context_ranks=2)
    with joined("calibrate", line.recipe) as world:
        assert world.size == 1
    with pytest.raises(RecipeError, match=r"train\.context_ranks=2 does not divide the 1 process"), joined("train", line.recipe):
        pass


def together(recipe: Path, verb: str) -> None:
    done = subprocess.run(torchrun(recipe, verb=verb), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{verb}: done") == 1, "one process speaks"


def report(line: Line) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((line.folder / "report.json").read_text())
    return found


def test_other_verbs_are_refused(base_folder: Path, tmp_path: Path) -> None:
    recipe, line = prepared(base_folder, tmp_path)
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "firesteel.cli.app", "run", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "`firesteel run` is the work of one process, and this is one of 2 (WORLD_SIZE=2)" in done.stderr
    assert not (line.folder / "train").exists()


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all(base_folder: Path, tmp_path: Path) -> None:
    """A world size that does not divide: every rank says so, nobody waits."""
    recipe, _ = prepared(base_folder, tmp_path, context_ranks=3)
    done = subprocess.run(torchrun(recipe), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "train.context_ranks=3 does not divide the 2 processes of this run" in done.stderr
    assert "Traceback" not in done.stderr.split("error:")[1].split("\n")[0]


def workers(parent: int) -> list[int]:
    """Processes that torchrun has started, in the order of their ranks."""
    try:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [int(p) for p in found if b"firesteel.cli.app" in Path(f"/proc/{p}/cmdline").read_bytes()]
    except OSError:
        return []


@pytest.mark.slow
def test_a_killed_rank_comes_back_and_the_run_finishes(base_folder: Path, tmp_path: Path) -> None:
    recipe, line = prepared(base_folder, tmp_path, max_steps=300, validate_every=100)
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(torchrun(recipe, "--max-restarts", "2"), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    metrics = line.folder / "train.partial" / "metrics.jsonl"
    try:
        while process.poll() is None and not any(r["step"] >= 20 for r in read_metrics(metrics)):
            time.sleep(0.05)
        victims = workers(process.pid)
        assert len(victims) == 2
        os.kill(victims[1], signal.SIGKILL)
        process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = (tmp_path / "log").read_text()
    assert process.returncode == 0, text
    assert "train: resuming" in text
    about = json.loads((line.folder / "train" / "manifest.json").read_text())["about"]
    assert about["steps"] == 300
    steps = [r["step"] for r in read_metrics(line.folder / "train" / "metrics.jsonl") if r["kind"] == "train"]
    assert steps == [1, *range(10, 301, 10)], "no step twice, none left out"
    # Resumed from a state, not from the start: the second life's clock goes on.
    assert about["epochs"] == pytest.approx(600 / len_epoch(text), rel=1e-6)


def len_epoch(text: str) -> int:
    return int(text.split(" batches per epoch")[0].split()[-1])
