"""`firesteel plan`: how many of which node, what limits them, how long it takes; and `--measure`, which asks this machine instead of the table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from firesteel.artifact import write_atomic
from firesteel.cluster.check import check_cluster
from firesteel.cluster.hardware import Hardware, load_hardware
from firesteel.cluster.measured import apply_measured, read_measured, write_measured
from firesteel.cluster.planner import Plan, make_plan
from firesteel.cluster.text import plan_lines
from firesteel.cluster.topology import Topology, make_topology
from firesteel.evaluation.queue_plot import write_queue_plot
from firesteel.recipe import Recipe
from firesteel.stages.line import Line
from firesteel.stages.measure import measure_machine
from firesteel.stages.sizes import drafter_shape, target_shape

FOLDER = "plan"


def table(recipe: Recipe) -> dict[str, Hardware]:
    """The hardware table with the user's rows, and kind `cpu` as measured on this machine, if it was."""
    return apply_measured(load_hardware(recipe.cluster.hardware), read_measured(recipe.target.cache_dir))


def plan_of(
    recipe: Recipe,
    hardware: Mapping[str, Hardware],
    *,
    length: int | None = None,
    tokens: float | None = None,
    simulate: float = 3600.0,
    failures: float | None = None,
) -> tuple[Topology, Plan]:
    """Place everything, refuse what cannot be, and plan.

    Raises:
        FiresteelError: the cluster does not fit itself, the recipe or the target.
    """
    topology = make_topology(recipe)
    target = target_shape(recipe)
    drafter = drafter_shape(recipe, target)
    check_cluster(recipe, topology, hardware, target, drafter)
    return topology, make_plan(recipe, topology, hardware, target, drafter, length=length, tokens=tokens, simulate=simulate, failure_every=failures)


def run(line: Line, *, measure: bool, length: int | None, tokens: float | None, out: Path | None, failures: float | None = None) -> None:
    """Say the plan, and leave it as `plan.json` and `queue.png` (not on a cluster's own paths, which this machine may lack).

    Args:
        measure: first measure this machine and remember that.
        length: tokens of a document.
        tokens: of the corpus.
        failures: mean hours between failures of one server.
        out: folder; None: `plan` in the run's where `runs_dir` is a relative path.
    """
    recipe, say = line.recipe, line.screen.say
    if measure:
        found = measure_machine(line)
        say(f"measured: {found.describe()}")
        say(f"kept in {write_measured(recipe.target.cache_dir, found)}; kind `cpu` of the hardware table stands for this machine from now on")
    _, plan = plan_of(recipe, table(recipe), length=length, tokens=tokens, failures=None if failures is None else 3600 * failures)
    for text in plan_lines(plan):
        say(text)
    if out is None and Path(recipe.runs_dir).expanduser().is_absolute():
        say("--out FOLDER keeps the plan as JSON, and a picture of the simulated queues")
        return
    folder = out or line.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "plan.json", json.dumps(plan.to_dict(), indent=1))
    if plan.simulated is not None:
        write_queue_plot(folder / "queue.png", plan.simulated.series, plan.simulated.waits, plan.rates.step)
    say(f"plan: {folder / 'plan.json'}, picture: {folder / 'queue.png'}")
