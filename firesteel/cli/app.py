"""The command line: verbs, overrides, errors without traceback.

Importing this module must stay cheap (`--help` within a second): the stages, and with them PyTorch, are loaded by name when
a verb runs.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from firesteel import __version__
from firesteel.artifact import disk_errors
from firesteel.errors import FiresteelError
from firesteel.kernels.memory import use_huge_pages
from firesteel.recipe import load_recipe, named_recipes, recipe_to_yaml

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A named recipe (see `firesteel recipe --list`) or a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings that replace the recipe's.", show_default=False)]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train, package, prove and deploy speculative-decoding drafters. Start with: firesteel run quickstart",
)
errors = Console(stderr=True, highlight=False)


def main() -> None:
    """Entry point: runs a verb, shows Firesteel's errors as one message, exit code 1 (130 on Ctrl-C)."""
    use_huge_pages()
    try:
        with disk_errors():
            app(standalone_mode=True)
    except FiresteelError as e:
        errors.print("[bold red]error:[/] ", end="")
        errors.print(str(e), markup=False, soft_wrap=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        errors.print("interrupted: finished work is kept, the same command resumes")
        raise SystemExit(130) from None


def _call(module: str, function: str, *args: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*args)


def _stage(verb: str, recipe: str, overrides: list[str] | None) -> None:
    _call("firesteel.cli.runner", "run_verb", verb, load_recipe(recipe, overrides or []))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def run(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Walk the whole line: prompts to report. Skips what is done, resumes what was interrupted."""
    _stage("run", recipe, overrides)


@app.command()
def check(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Preflight: checks settings, target and disk, and predicts bytes and time. Spends nothing."""
    _stage("check", recipe, overrides)


@app.command()
def prompts(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Read, check, dedupe and split the prompts."""
    _stage("prompts", recipe, overrides)


@app.command()
def respond(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Let the target answer the prompts."""
    _stage("respond", recipe, overrides)


@app.command()
def extract(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Capture the target's hidden states."""
    _stage("extract", recipe, overrides)


@app.command("extract-server")
def extract_server(
    recipe: RecipeName,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the commands.")] = False,
) -> None:
    """Start a vLLM server that hands out the target's hidden states."""
    _call("firesteel.cli.runner", "serve_states", load_recipe(recipe, overrides or []), dry_run)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    only: Annotated[
        str | None, typer.Option(metavar="ALGORITHM", help="Train only this one of the recipe's drafters; other processes train the others.")
    ] = None,
) -> None:
    """Train the drafter (and those to compare it with)."""
    _call("firesteel.cli.runner", "run_verb", "train", load_recipe(recipe, overrides or []), only)


@app.command()
def endpoints(
    recipe: RecipeName,
    action: Annotated[str, typer.Argument(help="list, add or remove.")] = "list",
    url: Annotated[str | None, typer.Argument(help="The server: http://HOST:PORT.")] = None,
) -> None:
    """The servers that a run takes hidden states from; add and remove them while it trains."""
    _call("firesteel.stages.endpoints", "run", load_recipe(recipe, []), action, url, typer.echo)


@app.command()
def status(
    recipe: RecipeName,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    every: Annotated[float | None, typer.Option(help="Print it again and again, after so many seconds, until Ctrl-C.")] = None,
) -> None:
    """Where a run stands: stages, training by process, servers, alarms. Reads the run's folder, from any machine that sees it."""
    settings = load_recipe(recipe, overrides or [])
    while True:
        _call("firesteel.stages.status", "run", settings, as_json, typer.echo)
        if every is None:
            break
        time.sleep(every)
        if not as_json:
            typer.echo()


@app.command()
def calibrate(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Calibrate the confidence head by sequential temperature scaling."""
    _stage("calibrate", recipe, overrides)


@app.command()
def package(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Export the checkpoint that vLLM loads, and prove that it decodes as validation promised."""
    _stage("package", recipe, overrides)


@app.command()
def evaluate(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Measure acceptance and speed on held-out prompts and write the report."""
    _stage("evaluate", recipe, overrides)


@app.command()
def report(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print the report's headline and where it lies."""
    _stage("report", recipe, overrides)


@app.command()
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    measure: Annotated[bool, typer.Option("--measure", help="First measure this machine, for half a minute, and remember that.")] = False,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a document; by default half of hidden.max_length.")] = None,
    tokens: Annotated[float | None, typer.Option(min=1, help="Tokens of the corpus, such as 2e9, for a time in hours.")] = None,
    failures: Annotated[float | None, typer.Option(min=0.01, help="Let servers fail in the simulation, each every so many hours on average.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for plan.json and queue.png; by default `plan` in the run's.")] = None,
) -> None:
    """Say how many of which node to use, what limits them and how long it takes. Starts nothing."""
    _call("firesteel.cli.runner", "plan_cluster", load_recipe(recipe, overrides or []), measure, length, tokens, out, failures)


@app.command()
def launch(
    recipe: RecipeName,
    overrides: Overrides = None,
    on: Annotated[str | None, typer.Option(help="local, ssh, slurm or kubernetes; by default cluster.launcher.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print every command, one block a node (or the script, or the manifests).")] = False,
) -> None:
    """Start servers and trainers on the machines of `cluster`, and stop all when the trainers are done."""
    raise typer.Exit(_call("firesteel.cli.runner", "launch_cluster", load_recipe(recipe, overrides or []), on, dry_run))


@app.command()
def recipe(
    name: Annotated[str | None, typer.Argument(help="A named recipe or a YAML file.")] = None,
    overrides: Overrides = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the named recipes.")] = False,
) -> None:
    """Print a recipe in full, every setting explained."""
    if list_all or name is None:
        print("\n".join(named_recipes()))
        return
    sys.stdout.write(recipe_to_yaml(load_recipe(name, overrides or []), explain=True))


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="A packaged drafter.")],
    target: Annotated[str, typer.Argument(help="The target it was trained for: a folder, hub name or pypi:PACKAGE.")],
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    overrides: Overrides = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    module: Annotated[str | None, typer.Option(help="Python module that registers the drafter's algorithm (drafter.module).")] = None,
    rejection: Annotated[str, typer.Option(help="How drafts are verified above temperature 0: token or block.")] = "token",
    scheduled: Annotated[bool, typer.Option(help="Verify as much as pays by this machine's costs, measured once (docs/scheduling.md).")] = False,
) -> None:
    """Ask the target one thing with a packaged drafter, and show how much was drafted."""
    _call("firesteel.cli.runner", "generate", folder, target, prompt, overrides or [], max_new_tokens, temperature, seed, module, rejection, scheduled)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a drafter: config.json and safetensors, in any layout of docs/convert.md.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    fields: Annotated[list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="What the source leaves open.", show_default=False)] = None,
    to: Annotated[str, typer.Option(help="speculators, deepspec or sglang.")] = "speculators",
    target: Annotated[str | None, typer.Option(help="The target it belongs to: checks the drafter and writes its contract.")] = None,
) -> None:
    """Convert a drafter's checkpoint from one layout into another."""
    _call("firesteel.cli.runner", "convert", source, out, to, target, fields or [])


@app.command()
def stitch(
    folder: Annotated[Path, typer.Argument(help="A packaged MTP head.")],
    target: Annotated[Path, typer.Argument(help="Folder of the target that it was trained for.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
) -> None:
    """Copy a target with a fine-tuned MTP head in place of its own, as servers load it."""
    _call("firesteel.cli.runner", "stitch", folder, target, out)


@app.command()
def serve(
    what: Annotated[str, typer.Argument(metavar="RECIPE_OR_FOLDER", help="A recipe whose drafter is packaged, or a packaged folder.")],
    overrides: Overrides = None,
    engine: Annotated[str | None, typer.Option(help="Who serves: vllm, own (Firesteel's engine), or auto. By default serve.engine, which is auto.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the production commands.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Only start the server, check it and stop it.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="FIRESTEEL_API_KEY", help="The key that clients of the own engine must send.")] = None,
) -> None:
    """Serve target and drafter: with vLLM on a GPU, after a check that it accepts what was measured, else with Firesteel's own engine."""
    # As YAML text: a key of digits stays a text.
    named = {"engine": engine, "api_key": None if api_key is None else json.dumps(api_key)}
    settings = [f"serve.{name}={value}" for name, value in named.items() if value is not None]
    _call("firesteel.cli.runner", "serve_drafter", what, [*(overrides or []), *settings], dry_run, smoke)


@app.command()
def bench(
    recipe: RecipeName,
    overrides: Overrides = None,
    server: Annotated[
        list[str] | None, typer.Option(metavar="NAME=URL", help="A server to measure; several are measured in alternation. Replaces bench.servers.")
    ] = None,
) -> None:
    """Load-test OpenAI-compatible servers: throughput against interactivity, with and without the drafter."""
    _call("firesteel.cli.runner", "bench_servers", load_recipe(recipe, overrides or []), server or [])


if __name__ == "__main__":
    main()
