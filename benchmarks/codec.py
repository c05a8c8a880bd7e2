"""What fp8 states cost: a drafter trained on states in fp8 beside one trained alike on states in bf16.

The prompts and answers of a recipe are made once. Then the line runs twice up to its package, with `hidden.codec=bf16` and `hidden.codec=fp8`, for the same
number of steps from the same seed: same batches, same anchors, same initial weights. Both packages decode the same held-out prompts greedily, in the same
decoder. A run that was interrupted goes on where it was. The last line of stdout is one JSON object; `ratio` is fp8's pooled acceptance length over bf16's
on shared prompts, with its interval in `comparison`; `change` is how far that is from 1; `accepted_ratio` the same of drafts accepted per round, which is
stricter; `validation_ratio` is of the acceptance lengths that training's own validation found, each on states of its codec; `bytes_ratio` of the stored
states of the training documents.

Usage: python benchmarks/codec.py RECIPE [section.key=value ...] --steps 1000 [--prompts 60]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from race import StderrScreen, answers, lengths, run_verbs
from running import facts

from firesteel.evaluation.acceptance import compare_drafters
from firesteel.evaluation.records import RequestRecord
from firesteel.evaluation.schema import Comparison
from firesteel.recipe import Recipe, load_recipe
from firesteel.stages import prompts as prompts_stage
from firesteel.stages.line import Line
from firesteel.stages.runtime import open_package

SHARED = ("prompts", "respond")
OWN = ("extract", "train", "calibrate", "package")
FOLDERS = ("prompts", "responses")  # what the shared stages leave
CODECS = ("bf16", "fp8")
_TOLD = ("steps", "epochs", "train_seconds", "skipped_steps", "acceptance_length", "validation_rounds", "validation_accepted", "tokens")


def arm_overrides(recipe: Recipe, codec: str) -> list[str]:
    """What an arm's recipe has beside the common overrides: its codec, a folder of its own, and no other drafter to train."""
    return [f"hidden.codec={codec}", f"runs_dir={recipe.run_dir / 'codec'}", f"name={codec}", "evaluate.compare=[]"]


def share(recipe: Recipe, codec: str) -> None:
    """Give an arm the prompts and answers; those of another recipe are replaced."""
    for name in FOLDERS:
        there, here = recipe.run_dir / "codec" / codec / name, recipe.run_dir / name
        if not there.is_dir() or (there / "manifest.json").read_bytes() != (here / "manifest.json").read_bytes():
            shutil.rmtree(there, ignore_errors=True)
            shutil.copytree(here, there)


def run_arm(name: str, overrides: list[str], codec: str, limit: int | None) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Train one arm and decode with it: what is to be reported, and the answers."""
    run_verbs(OWN, name, overrides)
    line = Line(load_recipe(name, overrides), StderrScreen())
    held = prompts_stage.read_prompts(line.input("prompts"), "eval")
    records = answers(line, open_package(line, line.input("package").path), codec, held, limit)
    about = line.input("train").manifest.about
    kept = {key: about[key] for key in _TOLD}
    return {**lengths(records, line.recipe), "validation": kept, "bytes": stored_bytes(line.folder / "hidden")}, records


def stored_bytes(folder: Path) -> int:
    """Bytes of the samples of a run."""
    return sum(p.stat().st_size for p in folder.rglob("*.safetensors"))


def summarise(arms: dict[str, dict[str, Any]], comparison: Comparison | None) -> dict[str, Any]:
    """Ratios of fp8 over bf16; None where there is nothing to divide."""
    fp8, bf16 = arms["fp8"], arms["bf16"]
    accepted = None if comparison is None or comparison.second_pooled <= 1 else (comparison.first_pooled - 1) / (comparison.second_pooled - 1)
    return {
        "ratio": comparison and comparison.ratio,
        "change": comparison and abs(comparison.ratio - 1),
        "accepted_ratio": accepted,
        "validation_ratio": fp8["validation"]["acceptance_length"] / bf16["validation"]["acceptance_length"],
        "bytes_ratio": fp8["bytes"] / bf16["bytes"] if bf16["bytes"] else None,
        "comparison": comparison and comparison.model_dump(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a named recipe or a YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--steps", type=int, required=True, help="of each training")
    parser.add_argument("--prompts", type=int, help="held-out prompts at most, spread over the domains; all if not given")
    a = parser.parse_intermixed_args()
    common = [*a.overrides, "train.max_minutes=null", "train.epochs=null", f"train.max_steps={a.steps}"]
    recipe = load_recipe(a.recipe, common)
    run_verbs(SHARED, a.recipe, common)
    arms: dict[str, dict[str, Any]] = {}
    records: dict[str, list[RequestRecord]] = {}
    for codec in CODECS:
        share(recipe, codec)
        arms[codec], records[codec] = run_arm(a.recipe, [*common, *arm_overrides(recipe, codec)], codec, a.prompts)
    comparison = compare_drafters(records["fp8"], records["bf16"], resamples=recipe.evaluate.bootstrap, seed=recipe.seed)
    result = {"benchmark": "codec", **summarise(arms, comparison), **arms, "steps": a.steps, "recipe": recipe.model_dump(), **facts()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
