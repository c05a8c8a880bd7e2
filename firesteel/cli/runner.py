"""Runs verbs: builds the line, walks the stages. Loaded only when a verb runs, because it brings PyTorch."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from firesteel.artifact import disk_errors
from firesteel.cli.screen import ConsoleScreen
from firesteel.errors import RecipeError
from firesteel.recipe import Recipe, load_recipe, recipe_from_dict, replace_settings
from firesteel.stages import bench, calibrate, check, evaluate, extract, extract_server, launch, package, plan, prompts, respond, serve, train
from firesteel.stages.configure import preflight
from firesteel.stages.convert import convert_once
from firesteel.stages.forecast import check_room_ahead
from firesteel.stages.generate import generate_once
from firesteel.stages.line import Line
from firesteel.stages.ranks import SilentScreen, joined
from firesteel.stages.stitch import stitch_once

# The whole system in one list; `run` walks it.
LINE: list[tuple[str, Callable[[Line], Any]]] = [
    ("prompts", prompts.run),
    ("respond", respond.run),
    ("extract", extract.run),
    ("train", train.run),
    ("calibrate", calibrate.run),
    ("package", package.run),
    ("evaluate", evaluate.run),
]


def run_verb(verb: str, recipe: Recipe, only: str | None = None) -> None:
    """Run one verb of the command line; `train` with `only` trains that one of the recipe's drafters."""
    _quiet()
    verbs: dict[str, Callable[[Line], Any]] = {**dict(LINE), "run": run_line, "check": check.run, "report": evaluate.show}
    if verb not in verbs:
        raise RecipeError(f"there is no verb {verb!r}", mend=f"verbs: {', '.join(verbs)}")
    with joined(verb, recipe) as world:
        line = Line(recipe, ConsoleScreen() if world.first else SilentScreen(), world)
        if verb == "train":  # a compared drafter that cannot be must not be found out after the first one's hours
            preflight(line)
        with disk_errors(line.folder):
            verbs[verb](line, **({} if only is None else {"only": only}))


def serve_states(recipe: Recipe, dry_run: bool) -> None:
    """A vLLM server that captures, until it is stopped."""
    _quiet()
    extract_server.run(Line(recipe, ConsoleScreen()), dry_run=dry_run)


def serve_drafter(what: str, overrides: list[str], dry_run: bool, smoke: bool) -> None:
    """Target and drafter by a real server, of a recipe or of a packaged folder."""
    _quiet()
    folder = Path(what) if (Path(what) / "config.json").is_file() else None
    recipe = load_recipe(what, overrides) if folder is None else recipe_from_dict(replace_settings(serve.recipe_settings(folder), overrides))
    line = Line(recipe, ConsoleScreen())
    # By name: it needs FastAPI, which those who serve with vLLM need not have.
    served = importlib.import_module("firesteel.stages.serve_own") if serve.engine_of(line, dry_run=dry_run) == "own" else serve
    served.run(line, folder, dry_run=dry_run, smoke=smoke)


def bench_servers(recipe: Recipe, servers: list[str]) -> None:
    """A load test of running servers."""
    _quiet()
    bench.run(Line(recipe, ConsoleScreen()), bench.named_servers(servers))


def plan_cluster(recipe: Recipe, measure: bool, length: int | None, tokens: float | None, out: Path | None, failures: float | None) -> None:
    """What a cluster would do."""
    _quiet()
    plan.run(Line(recipe, ConsoleScreen()), measure=measure, length=length, tokens=tokens, out=out, failures=failures)


def launch_cluster(recipe: Recipe, launcher: str | None, dry_run: bool) -> int:
    """A run on a cluster; the trainers' exit code."""
    if launcher not in (None, "local", "ssh", "slurm", "kubernetes"):
        raise RecipeError(f"--on {launcher} is not known", mend="local, ssh, slurm or kubernetes")
    _quiet()
    return launch.run(Line(recipe, ConsoleScreen()), launcher, dry_run=dry_run)


def run_line(line: Line) -> None:
    """Walk all stages; what is done is skipped, what was interrupted is resumed."""
    started = time.monotonic()
    preflight(line)
    check_room_ahead(line)
    for _, stage in LINE:
        stage(line)
    line.screen.say(f"whole line: {time.monotonic() - started:.0f} s")
    evaluate.show(line)


def generate(
    folder: Path,
    target: str,
    prompt: str,
    overrides: list[str],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    module: str | None,
    rejection: str,
    scheduled: bool,
) -> None:
    """One prompt through a packaged drafter."""
    _quiet()
    settings: dict[str, Any] = {"target": {"model": target}, "drafter": {"module": module}, "train": {"max_steps": 1}}
    settings["evaluate"] = {"max_new_tokens": max_new_tokens, "rejection": rejection}
    recipe = recipe_from_dict(replace_settings({"name": "generate", "seed": seed, **settings}, overrides))
    generate_once(Line(recipe, ConsoleScreen()), folder, prompt, max_new_tokens, temperature, scheduled=scheduled)


def convert(source: Path, out: Path, to: str, target: str | None, overrides: list[str]) -> None:
    """One checkpoint into another layout."""
    _quiet()
    settings = {"name": "convert", "target": {"model": target}, "train": {"max_steps": 1}}
    screen = ConsoleScreen()
    convert_once(None if target is None else Line(recipe_from_dict(settings), screen), screen, source, out, to, overrides)


def stitch(folder: Path, target: Path, out: Path) -> None:
    """A packaged MTP head into a copy of its target."""
    stitch_once(ConsoleScreen(), folder, target, out)


def _quiet() -> None:
    """Libraries' progress bars and notices would drown ours."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
    torch.set_float32_matmul_precision("highest")
