"""`firesteel extract-server`: a vLLM server that hands out the recipe's hidden states, until it is stopped."""

from __future__ import annotations

import sys
import time

from firesteel.errors import RecipeError
from firesteel.stages.line import Line, pick_layer_ids
from firesteel.target.layout import read_layout
from firesteel.target.server import Server, ServerPlan, leave_on_signals, plan_server


def plan(line: Line) -> ServerPlan:
    """What the recipe's server is; loads no weights here.

    Raises:
        RecipeError: the recipe contradicts itself or the target.
        TargetError: the target's config cannot be read.
    """
    recipe = line.recipe
    layout = read_layout(recipe.target)
    ids = pick_layer_ids(recipe, layout.num_layers)
    return plan_server(
        recipe.target, recipe.hidden, line.folder, model=layout.path, layer_ids=ids, num_layers=layout.num_layers, max_positions=layout.max_positions
    )


def run(line: Line, *, dry_run: bool) -> None:
    """Start the server, say when it is ready, and stop it with this process; with `dry_run` only print the commands."""
    made = plan(line)
    if dry_run:
        sys.stdout.write(made.shell() + "\n")
        return
    if line.recipe.target.endpoints:
        raise RecipeError("target.endpoints names servers that are up already", mend="leave it out on the machine that starts one: target.endpoints=[]")
    leave_on_signals()
    folder = line.folder / "server"
    line.screen.say(f"extract-server: starting; its log is {folder / 'server.log'}")
    started = time.monotonic()
    with Server(made, folder, line.recipe.target.vllm.start_timeout) as server:
        line.screen.say(f"extract-server: ready at {made.url} after {time.monotonic() - started:.0f} s; Ctrl-C stops it")
        server.wait()
