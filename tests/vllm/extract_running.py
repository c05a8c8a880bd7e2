"""A real vLLM server with the connector, and a client of it; skipped with a reason where vLLM's environment is not there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from extract_cases import LAYER_IDS, LAYERS, POSITIONS, save_served_target
from ports import free_port
from transformers import LlamaForCausalLM

from firesteel.hidden.exchange import Exchange, open_exchange
from firesteel.hidden.weights import weights_digest
from firesteel.recipe import Recipe, recipe_from_dict
from firesteel.target.server import Server, exchange_config, plan_server
from firesteel.target.vllm import VllmStates

PYTHON = Path(os.environ.get("FIRESTEEL_VLLM_PYTHON", Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"))
LONGEST = 400


def need_vllm() -> None:
    if not PYTHON.is_file():
        pytest.skip(f"there is no environment with vLLM at {PYTHON.parent.parent} (make vllm-env)")


@dataclass
class Running:
    """A server that is up: its address, the recipe it was started by, its target's folder and Transformers model, the run's folder."""

    url: str
    recipe: Recipe
    target: Path
    model: Any
    folder: Path

    def client(self, exchange: Exchange | None = None, **changes: Any) -> VllmStates:
        settings: dict[str, Any] = {
            "layer_ids": LAYER_IDS,
            "num_layers": LAYERS,
            "target": "fingerprint",
            "weights": weights_digest(str(self.target)),
            "codec": "fp32",
            "timeout": 60.0,
        }
        return VllmStates(exchange or open_exchange(exchange_config(self.recipe.hidden, self.folder, segment=False)), **{**settings, **changes})


@contextmanager
def running(folder: Path, hidden: dict[str, Any], args: list[str], *, devices: int = 1, second_runner: bool = False) -> Iterator[Running]:
    need_vllm()
    target = save_served_target(folder / "target")
    settings = {
        "name": "served",
        "runs_dir": str(folder),
        "train": {"max_steps": 1},
        "target": {
            "model": str(target),
            "engine": "vllm",
            "device": "cpu",
            "vllm": {"python": str(PYTHON), "port": free_port(), "tensor_parallel": devices, "args": args},
        },
        "hidden": {"codec": "fp32", "max_length": LONGEST, **hidden},
    }
    recipe = recipe_from_dict(settings)
    plan = plan_server(recipe.target, recipe.hidden, recipe.run_dir, model=str(target), layer_ids=LAYER_IDS, num_layers=LAYERS, max_positions=POSITIONS)
    # One thread: tests run beside others.
    plan.env.update({"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    if second_runner:  # the one that vLLM takes on GPUs
        plan.env.update({"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": f"{plan.env['PYTHONPATH']}:{Path(__file__).parent / 'shim'}"})
    model = LlamaForCausalLM.from_pretrained(target).eval()
    with Server(plan, recipe.run_dir / "server", timeout=550):
        yield Running(plan.url, recipe, target, model, recipe.run_dir)


def run(states: VllmStates, job: Callable[[VllmStates], Awaitable[Any]]) -> Any:
    """Run a job with a client, which is closed afterwards."""

    async def main() -> Any:
        try:
            return await job(states)
        finally:
            await states.close()

    return asyncio.run(main())
