"""An algorithm from outside walks the whole line: nothing in training, packaging or evaluation knows its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from firesteel.cli.runner import run_line
from firesteel.drafters.keys import Key
from firesteel.drafters.registry import get_spec, register
from firesteel.errors import CheckpointError, RecipeError
from firesteel.evaluation.report import read_report
from firesteel.package.load import load
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]
OWN = {"algorithm": "bigram", "module": "outside_drafter", "options": {"scale": 2.0}, "draft_vocab_size": 40}


def test_it_walks_the_line(make_line: MakeLine) -> None:
    line = make_line(drafter=OWN, train={"max_steps": 40, "lr": 1e-2}, evaluate={"compare": ["dspark"], "temperatures": [0.0, 1.0]})
    run_line(line)
    report = read_report(line.folder / "report.json")
    assert set(report["drafters"]) == {"bigram", "dspark"}
    loaded = load(line.folder / "package")
    assert (loaded.config.algorithm, loaded.config.extra, set(loaded.tensors)) == ("bigram", {"scale": 2.0}, {"mix.weight"})
    assert "# Bigram drafter" in (line.folder / "package" / "README.md").read_text()
    about = json.loads((line.folder / "package" / "manifest.json").read_text())["about"]
    assert about["proof"]["decoded"] == pytest.approx(about["proof"]["promised"], abs=1e-9)
    # A process of its own, in which nobody has imported the module yet.
    ask = ["generate", str(line.folder / "package"), line.recipe.target.model, "w1 w9 w33", "target.threads=1", "--max-new-tokens", "8"]
    script = [sys.executable, "-m", "firesteel.cli.app", *ask]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    told, untold = (subprocess.run(args, capture_output=True, text=True, env=env, check=False) for args in ([*script, "--module", "outside_drafter"], script))
    assert "acceptance length" in told.stdout, told.stderr
    assert "--module" in untold.stderr + untold.stdout


def test_its_options_are_its_own(make_line: MakeLine) -> None:
    with pytest.raises(RecipeError, match="bigram does not know"):
        run_line(make_line(drafter={**OWN, "options": {"scael": 2.0}}))


def test_a_key_table_that_is_not_the_module_is_found_before_training(make_line: MakeLine) -> None:
    line, spec = make_line(drafter=OWN), get_spec("bigram")
    register(replace(spec, keys=lambda config: {"mixed.weight": Key((config.hidden_size, config.hidden_size))}))
    try:
        with pytest.raises(CheckpointError, match=r"drafter.algorithm=bigram: the module lacks mixed.weight and holds mix.weight"):
            run_line(line)
    finally:
        register(spec)
    assert not line.folder.exists()


def test_a_module_that_is_not_there(make_line: MakeLine) -> None:
    with pytest.raises(RecipeError, match=r"drafter\.module=no_such_module"):
        make_line(drafter={**OWN, "module": "no_such_module"})


def test_the_toy_is_all_there_is() -> None:
    """No file of the package names it."""
    root = Path(__file__).parents[2] / "firesteel"
    assert not [p for p in root.rglob("*.py") if "bigram" in p.read_text().lower()]
    code = "import firesteel.drafters.registry as r; assert 'bigram' not in r.names(), r.names()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
