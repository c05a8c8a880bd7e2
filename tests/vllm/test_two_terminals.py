"""docs/two-terminals.md with a real vLLM, its recipe with a tiny target in SmolLM2's place: prompts to package, states streamed from `extract-server`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from extract_running import PYTHON
from line_screen import QuietScreen
from ports import free_port

from firesteel.cli.runner import LINE
from firesteel.package.load import describe
from firesteel.recipe import load_recipe
from firesteel.stages.line import Line
from firesteel.training.metrics import read_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
STEPS = 30
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
# What a target of four layers and sixty-four words wants to be otherwise, and what makes it quick.
SMALLER: dict[str, dict[str, Any]] = {
    "target": {"layer_ids": [1, 2, 4], "threads": 1, "device": "cpu"},
    "prompts": {"max_tokens": 64, "validation": 0.1},
    "responses": {"max_new_tokens": 64, "batch_size": 16, "answers": None},
    "hidden": {"codec": "fp32", "max_length": 256},
    "drafter": {"draft_vocab_size": None},
    "train": {"max_minutes": None, "max_steps": STEPS, "batch_tokens": 512, "anchors": 64, "validate_every": 15, "compile": False},
    "package": {"proof_prompts": 4, "tolerance": 0.5},
}


def write_recipe(folder: Path, counting: Path, hidden: dict[str, Any]) -> Path:
    """The recipe of the page, made smaller; every other setting is the page's."""
    (shown,) = re.findall(r"```yaml\n(# two-terminals\.yaml\n.*?)```", (ROOT / "docs" / "two-terminals.md").read_text(), re.S)
    settings: dict[str, Any] = yaml.safe_load(shown)
    for section, values in SMALLER.items():
        settings[section].update(values)
    settings["target"].update(model=str(counting / "target"), vllm={"python": str(PYTHON), "port": free_port(), "start_timeout": 550})
    settings["prompts"]["sources"] = [{"path": str(counting / "train.jsonl")}, {"path": str(counting / "eval.jsonl"), "split": "eval"}]
    settings["hidden"].update(hidden)
    file = folder / "two-terminals.yaml"
    file.write_text(yaml.safe_dump({**settings, "runs_dir": str(folder / "runs")}))
    return file


@contextmanager
def first_terminal(file: Path) -> Iterator[subprocess.Popen[str]]:
    """`firesteel extract-server`, up; ended by its id."""
    command = [sys.executable, "-m", "firesteel.cli.app", "extract-server", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **ENVIRONMENT})
    try:
        assert process.stdout is not None
        said = ""
        for text in process.stdout:
            said += text
            if "ready at" in text:
                break
        else:
            pytest.fail(f"no server: {said}")
        yield process
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("transport", ["disk", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def test_the_page_from_prompts_to_package(transport: str, counting: Path, tmp_path: Path) -> None:
    hidden: dict[str, Any] = {"transport": transport}
    if transport == "mooncake":
        pytest.importorskip("mooncake.store", reason="Mooncake is not installed here: pip install 'firesteel[mooncake]'", exc_type=ImportError)
        if not (PYTHON.parent / "mooncake_master").is_file():
            pytest.skip("Mooncake is not installed in vLLM's environment")
        hidden["mooncake"] = {"port": free_port(2), "segment_gb": 1 / 16, "buffer_gb": 1 / 64}
    recipe = load_recipe(str(write_recipe(tmp_path, counting, hidden)))
    assert (recipe.target.engine, recipe.hidden.store, recipe.drafter.algorithm) == ("vllm", "stream", "dflash")
    line = Line(recipe, QuietScreen())
    with first_terminal(tmp_path / "two-terminals.yaml") as server:
        for name, stage in LINE:
            if name == "evaluate":  # decodes in this process, as every run does
                break
            stage(line)
        assert server.poll() is None
    assert server.returncode == 128 + signal.SIGTERM
    steps = [row for row in read_metrics(line.folder / "train" / "metrics.jsonl") if "grad_norm" in row]
    assert steps[-1]["step"] == STEPS
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert not list((line.folder / "hidden").glob("**/*.safetensors")), "nothing is kept"
    if transport == "disk":
        assert not [p for p in (line.folder / "exchange").rglob("*") if p.is_file()], "what was used is deleted"
    config, contract = describe(line.folder / "package")
    assert config.algorithm == "dflash"
    assert contract is not None
    assert contract.speculative_tokens == 4
