"""`firesteel status`: where a run stands, read from its folder, by anyone who sees it. Loads no PyTorch and disturbs nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from firesteel.artifact import WORK, open_artifact
from firesteel.errors import ArtifactError
from firesteel.recipe import Recipe
from firesteel.training.events import JOURNAL, read_events, sentence
from firesteel.training.status import EVERY, endpoints_of, read_status

STAGES = ("prompts", "responses", "hidden", "train", "calibrate", "package", "evaluate")
_PARTIAL = ".partial"
_SILENT = 6 * EVERY  # seconds without a word after which a process counts as gone
_LAST = 5  # events that are shown


def state_of(recipe: Recipe) -> dict[str, Any]:
    """All that is known of a run.

    Returns:
        `stages` (name -> done, working or missing), `trained` (what each finished drafter's manifest says, by name), `training` (for each drafter in work:
        `name`, `ranks`, `events`) and `endpoints` (rows).
    """
    folder = recipe.run_dir
    working = sorted(p for p in folder.glob(f"*{_PARTIAL}") if (p / WORK).is_file())
    stages = {name: "missing" if _about(folder / name) is None else "done" for name in STAGES}
    trained = {p.name: about for p in sorted(folder.glob("train*")) if (about := _about(p)) is not None}
    training, endpoints = [], []
    for path in working:
        name = path.name.removesuffix(_PARTIAL)
        stages[name] = "working"
        if name.split("-")[0] == "train":
            ranks = read_status(path)
            endpoints += endpoints_of(ranks)
            training.append({"name": name, "ranks": ranks, "events": [{**asdict(e), "text": sentence(e)} for e in read_events(path)[-_LAST:]]})
    return {"run": str(folder), "time": time.time(), "stages": stages, "trained": trained, "training": training, "endpoints": endpoints}


def run(recipe: Recipe, as_json: bool, say: Callable[[str], None]) -> None:
    """Print where a run stands."""
    found = state_of(recipe)
    say(json.dumps(found) if as_json else "\n".join(lines(found)))


def lines(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    signs = {"done": "[x]", "working": "[~]", "missing": "[ ]"}
    text = [f"run {found['run']}", "  ".join(f"{signs[state]} {name}" for name, state in found["stages"].items())]
    for name, about in found["trained"].items():
        done = f"{about['steps']:,} steps in {span(about['train_seconds'])}, acceptance length {about['acceptance_length']:.3f} in validation"
        text.append(f"{name}: {about['algorithm']}, {done}; what happened is in {name}/{JOURNAL}")
    for training in found["training"]:
        text += _training(training)
    rows = found["endpoints"]
    if rows:
        text += ["", f"servers ({sum(r['tokens_per_second'] for r in rows):,.0f} tokens/s of late):"]
        text += [
            f"  {r['url']}  {r['state']}  {r['tokens_per_second']:,.0f} tokens/s, {r['answers']:,} answers, {r['faults']:,} faults, {r['bad']:,} bad"
            for r in rows
        ]
    return text


def _training(training: dict[str, Any]) -> list[str]:
    ranks = training["ranks"]
    text = ["", f"{training['name']}:"]
    first = next((r for r in ranks if r["rank"] == 0 and "step" in r), None)
    if first is None:
        text.append("  no step yet")
    else:
        eta = "" if first["eta"] is None else f", {span(first['eta'])} to go"
        text.append(f"  step {first['step']:,}, {first['done']:.0%} of the budget after {span(first['seconds'])}{eta}; loss {first['loss']:.3f}")
        best = f"best acceptance length {first['best']:.3f} at step {first['best_step']:,}" if first["best"] else "not validated yet"
        state = f"last state: step {first['state_step']:,}" if first["state_step"] >= 0 else "no state saved yet"
        text.append(f"  {best}; {state}")
        if first["returns"] or first["skipped"] or first["spiked"]:
            skipped = f"{first['skipped']} steps not finite, {first['spiked']} spikes"
            text.append(f"  {skipped}, {first['returns']} returns to a good state (learning rates x {first['rate']:g})")
    for r in (r for r in ranks if "step" in r):
        age, quiet = r["age"], ""
        if age is None:
            quiet = f"; last heard at {time.strftime('%H:%M:%S', time.gmtime(r['time']))} by its own clock"
        elif age > _SILENT:
            quiet = f"; nothing heard for {span(age)}: stopped?"
        held = "" if r["held"] is None else f", {r['held']:,} tokens held or asked for"
        text.append(f"  rank {r['rank']} on {r['host']}: {r['tokens_per_second']:,.0f} tokens/s, waited {span(r['waited'])}{held}{quiet}")
    if training["events"]:
        text.append("  of late:")
        text += [f"    {time.strftime('%H:%M:%S', time.gmtime(e['time']))} {e['text']}" for e in training["events"]]
    return text


def _about(path: Path) -> dict[str, Any] | None:
    """What the manifest of a finished stage says, if this is one."""
    try:
        return open_artifact(path, path.name, verify=False).manifest.about
    except ArtifactError:
        return None


def span(seconds: float) -> str:
    """A time in the unit that suits its length."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
