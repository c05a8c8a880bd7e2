"""A training process as it is seen from outside: its file, its metrics, and `firesteel status`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from parallel_cases import make_job
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families

from firesteel import recipe as recipes
from firesteel.artifact import ArtifactWriter
from firesteel.errors import RecipeError
from firesteel.recipe import Recipe
from firesteel.stages import status as stage
from firesteel.training.loop import train
from firesteel.training.status import Status, endpoints_of, read_status


def recipe_in(folder: Path) -> Recipe:
    return Recipe(name="seen", runs_dir=str(folder), train={"max_steps": 1})  # type: ignore[arg-type]


def test_metrics_while_training_runs(tmp_path: Path) -> None:
    port, pages = free_port(), []
    job = make_job(tmp_path, max_steps=5, validate_every=5)
    job.watch = recipes.Watch(metrics_port=port)

    def on_step(values: dict[str, Any]) -> None:
        if values.get("step") == 4 and "done" in values:
            pages.append(httpx.get(f"http://127.0.0.1:{port}/metrics").text)

    job.on_step = on_step
    train(job)
    found = {s.name: s for family in text_string_to_metric_families(pages[0]) for s in family.samples}
    assert found["firesteel_train_step"].value == 3, "of the step before"
    assert found["firesteel_train_step"].labels == {"rank": "0", "host": socket.gethostname()}
    assert found["firesteel_train_tokens_total"].value > 100
    assert 0 < found["firesteel_train_loss"].value < 10
    assert found["firesteel_train_progress_ratio"].value < 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        job = make_job(tmp_path)
        job.watch = recipes.Watch(metrics_port=s.getsockname()[1])
        with pytest.raises(RecipeError, match=r"watch\.metrics_port"):
            train(job)


def test_status_of_a_run_that_trains(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    (recipe.run_dir).mkdir(parents=True)
    assert stage.state_of(recipe)["stages"] == dict.fromkeys(stage.STAGES, "missing")
    ArtifactWriter(recipe.run_dir / "prompts", "prompts", {}, {}).commit()
    writer = ArtifactWriter(recipe.run_dir / "train", "train", {}, {})
    url = "http://127.0.0.1:1"
    rows = [{"url": url, "state": "up", "flying": 1, "answers": 7, "faults": 1, "bad": 0, "tokens_per_second": 1234.0, "error": ""}]
    job = make_job(writer.path, max_steps=12, validate_every=6)
    job.source.endpoints = lambda: rows  # type: ignore[method-assign]
    train(job)
    found = stage.state_of(recipe)
    assert found["stages"] | {"prompts": "done", "train": "working", "package": "missing"} == found["stages"]
    (rank,) = found["training"][0]["ranks"]
    assert (rank["step"], rank["done"], rank["state_step"], rank["size"]) == (12, 1.0, 12, 1)
    assert rank["tokens_per_second"] > 0
    text = "\n".join(stage.lines(found))
    assert "[x] prompts" in text
    assert "[~] train" in text
    assert "step 12, 100% of the budget" in text
    assert f"best acceptance length {rank['best']:.3f}" in text
    assert f"{url}  up  1,234 tokens/s, 7 answers, 1 faults, 0 bad" in text
    assert "training ends (budget)" in text
    assert "stopped?" not in text
    about = {"algorithm": "dspark", "steps": 12, "train_seconds": 3.0, "acceptance_length": 1.25}
    ArtifactWriter(recipe.run_dir / "train-dflash", "train-dflash", {}, {}).commit(about)
    assert "train-dflash: dspark, 12 steps in 3 s, acceptance length 1.250 in validation" in "\n".join(stage.lines(stage.state_of(recipe)))
    set_age(writer.path, 200)
    assert "nothing heard for 3 min: stopped?" in "\n".join(stage.lines(stage.state_of(recipe)))


def set_age(folder: Path, seconds: float) -> None:
    """As if the file had been written so long ago, by the file system's clock."""
    (file,) = (folder / "status").iterdir()
    then = file.stat().st_mtime - seconds
    os.utime(file, (then, then))


@pytest.mark.parametrize("apart", [-7200.0, 7200.0])
def test_clocks_of_hosts_may_be_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: float) -> None:
    """The trainer's clock is hours off the reader's: what counts is when its file was written."""
    recipe = recipe_in(tmp_path)
    folder = ArtifactWriter(recipe.run_dir / "train", "train", {}, {}).path
    own = time.time() + apart
    row = {"url": "http://a", "state": "up", "flying": 1, "answers": 7, "faults": 1, "bad": 0, "tokens_per_second": 50.0, "error": ""}
    status = Status(folder, 0, 1, lambda: [row])
    with monkeypatch.context() as patch:
        patch.setattr("firesteel.training.status.time.time", lambda: own)
        values = {"step": 3, "done": 0.5, "seconds": 9.0, "loss": 2.0, "best": 0.0, "best_step": 0, "state_step": -1, "waited": 0.0, "held": None}
        status.update(100, {**values, "returns": 0, "skipped": 0, "spiked": 0, "rate": 1.0})

    def said() -> str:
        return "\n".join(stage.lines(stage.state_of(recipe)))

    assert "stopped?" not in said()
    assert "http://a  up  50 tokens/s" in said()
    set_age(folder, 200)
    assert "nothing heard for 3 min: stopped?" in said()
    assert "http://a" not in said(), "what it said of its servers is no news"


def test_where_nothing_can_be_written_the_time_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_in(tmp_path)
    folder = ArtifactWriter(recipe.run_dir / "train", "train", {}, {}).path
    (folder / "status").mkdir()
    rank = {"rank": 0, "host": "h", "time": 3600.0, "tokens_per_second": 1.0, "waited": 0.0, "held": None, "step": 1}
    (folder / "status" / "1.json").write_text(json.dumps({**rank, "rank": 1}))
    monkeypatch.setattr("firesteel.training.status._now_at", lambda folder: None)
    text = "\n".join(stage.lines(stage.state_of(recipe)))
    assert "rank 1 on h: 1 tokens/s, waited 0 s; last heard at 01:00:00 by its own clock" in text
    assert "stopped?" not in text


def test_the_command_needs_no_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(f"name: seen\nruns_dir: {tmp_path}\ntrain: {{max_steps: 1}}\n")
    code = (
        "import sys, firesteel.cli.app as a\n"
        "from typer.testing import CliRunner\n"
        f"done = CliRunner().invoke(a.app, ['status', {str(file)!r}, '--json'])\n"
        "assert done.exit_code == 0, done.output\n"
        "assert 'torch' not in sys.modules\n"
        "print(done.output)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["stages"]["train"] == "missing"


def test_servers_of_all_ranks_are_put_together() -> None:
    """One that two ranks ask is counted once, with what both have seen; a rank that has long said nothing does not count."""

    def row(url: str, state: str = "up", error: str = "") -> dict[str, Any]:
        return {"url": url, "state": state, "flying": 1, "answers": 10, "faults": 2, "bad": 0, "tokens_per_second": 50.0, "error": error}

    ranks = [
        {"age": 5.0, "endpoints": [row("a"), row("b")]},
        {"age": None, "endpoints": [row("b", "resting", "gone")]},
        {"age": 99.0, "endpoints": [row("c")]},
        {"rank": 3},
    ]
    a, b = endpoints_of(ranks)
    assert a == row("a")
    assert b == {"url": "b", "state": "resting", "flying": 2, "answers": 20, "faults": 4, "bad": 0, "tokens_per_second": 100.0, "error": "gone"}


def test_a_torn_status_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "0.json").write_text("{")
    (tmp_path / "status" / "1.json").write_text('{"rank": 1}')
    (found,) = read_status(tmp_path)
    assert found == {"rank": 1, "age": pytest.approx(0, abs=5)}
    assert len(list((tmp_path / "status").iterdir())) == 2, "looking leaves nothing behind"
