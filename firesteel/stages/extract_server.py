"""`firesteel extract-server`: a vLLM server that hands out the recipe's hidden states, until it is stopped."""

from __future__ import annotations

import sys
import time

import torch

from firesteel.errors import RecipeError
from firesteel.stages.line import Line, pick_layer_ids
from firesteel.stages.underway import check_room, largest_sample
from firesteel.target.layout import Layout, read_layout
from firesteel.target.server import Server, ServerPlan, leave_on_signals, plan_server


def plan(line: Line) -> ServerPlan:
    """What the recipe's server is; loads no weights here.

    Raises:
        RecipeError: the recipe contradicts itself or the target, or its store does not hold the samples under way.
        TargetError: the target's config cannot be read.
    """
    recipe = line.recipe
    layout, ids = _captured(line)
    check_room(recipe.hidden, len(ids), layout.hidden_size)
    return plan_server(
        recipe.target, recipe.hidden, line.folder, model=layout.path, layer_ids=ids, num_layers=layout.num_layers, max_positions=layout.max_positions
    )


def estimate(line: Line) -> str:
    """What samples will take, in words, before anything is started: one, all that are under way, and vLLM's own cache of one."""
    hidden, (layout, ids) = line.recipe.hidden, _captured(line)
    one, every = largest_sample(hidden, len(ids), layout.hidden_size), check_room(hidden, len(ids), layout.hidden_size)
    cached = hidden.max_length * len({*ids, layout.num_layers}) * layout.hidden_size * getattr(torch, line.recipe.target.dtype).itemsize
    place = f"hidden.mooncake.segment_gb={hidden.mooncake.segment_gb:g}" if hidden.transport == "mooncake" else "the exchange's folder"
    return (
        f"states of a document of {hidden.max_length} tokens take up to {one / 2**20:.1f} MiB on their way ({hidden.codec}), {cached / 2**20:.1f} MiB in "
        f"vLLM's cache; the {hidden.feed.concurrency} that a trainer process has under way at a time, {every / 2**20:.1f} MiB of {place}"
    )


def _captured(line: Line) -> tuple[Layout, tuple[int, ...]]:
    layout = read_layout(line.recipe.target)
    return layout, pick_layer_ids(line.recipe, layout.num_layers)


def run(line: Line, *, dry_run: bool) -> None:
    """Start the server, say when it is ready, and stop it with this process; with `dry_run` only print the commands."""
    made, sizes = plan(line), estimate(line)
    if dry_run:
        sys.stderr.write(f"{sizes}\n")
        sys.stdout.write(made.shell() + "\n")
        return
    if line.recipe.target.endpoints:
        raise RecipeError("target.endpoints names servers that are up already", mend="leave it out on the machine that starts one: target.endpoints=[]")
    leave_on_signals()
    folder = line.folder / "server"
    line.screen.say(f"extract-server: {sizes}")
    line.screen.say(f"extract-server: starting; its log is {folder / 'server.log'}")
    started = time.monotonic()
    with Server(made, folder, line.recipe.target.vllm.start_timeout) as server:
        line.screen.say(f"extract-server: ready at {made.url} after {time.monotonic() - started:.0f} s; Ctrl-C stops it")
        server.wait()
