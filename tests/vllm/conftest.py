"""A real vLLM in an environment of its own (`make vllm-env`): its tests are skipped, and say so, where that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "line"))

from served_drafts import TOKENS, Both, Served, decode_ours, eval_prompts, make_base, make_draft
from served_environment import HERE, vllm_environment, vllm_interpreter
from served_target import save_counting_target, write_counting_prompts

from firesteel.package.card import speculative_config


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM."""
    python = vllm_interpreter()
    if not python.is_file():
        pytest.skip("no vLLM: `make vllm-env` builds .venv-vllm (3 GB)")
    return python


@pytest.fixture(scope="session")
def counting(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> Path:
    """A folder with the counting target and its prompts."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("counting")
    save_counting_target(folder / "target")
    write_counting_prompts(folder / "train.jsonl", 60)
    write_counting_prompts(folder / "eval.jsonl", 6, start=1000)
    return folder


@pytest.fixture(scope="session")
def draft(counting: Path) -> Callable[[str], Served]:
    """Makes drafters, each once."""
    base, made = make_base(counting), {}

    def get(name: str) -> Served:
        if name not in made:
            made[name] = make_draft(counting, base, name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def run_engine(counting: Path, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs `engine.py`: {name: speculative config} -> its results."""

    def run(runs: dict[str, Any], prompts: list[list[int]], *, second_runner: bool, temperature: float = 0.0) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        job = {"target": str(counting / "target"), "prompts": prompts, "max_tokens": TOKENS, "max_model_len": 256, "temperature": temperature, "runs": runs}
        (folder / "job.json").write_text(json.dumps(job))
        command = [str(vllm_python), str(HERE / "engine.py"), str(folder / "job.json"), str(folder / "out.json")]
        done = subprocess.run(command, env=vllm_environment(second_runner=second_runner), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads((folder / "out.json").read_text())
        for name, result in found.items():
            assert "error" not in result, f"{name}: {result['error']}\n{result['trace']}"
        return found

    return run


@pytest.fixture(scope="session")
def serve_both(draft: Callable[[str], Served], run_engine: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Both]]:
    """Serves drafters with vLLM, all in one process, and with our own engine."""

    def serve(names: tuple[str, ...], *, second_runner: bool) -> dict[str, Both]:
        served = {name: draft(name) for name in names}
        prompts = eval_prompts(served[names[0]].line)
        runs = {name: speculative_config(s.runtime.config, s.runtime.contract, str(s.package)) for name, s in served.items()}
        found = run_engine({"plain": None, **runs}, prompts, second_runner=second_runner)
        return {name: Both(s, [decode_ours(s, p, TOKENS) for p in prompts], found[name], found["plain"]["tokens"]) for name, s in served.items()}

    return serve
