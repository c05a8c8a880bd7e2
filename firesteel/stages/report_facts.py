"""What the report says beside what was measured: where the numbers come from, how drafters were trained, and what to expect."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import torch

from firesteel.artifact import Artifact, package_versions
from firesteel.evaluation.machine import machine_facts
from firesteel.evaluation.schema import Agreement, Calibration, Run, TargetFacts, Training, TrainingPoint
from firesteel.prompts.dropped import Dropped
from firesteel.stages import train as train_stage
from firesteel.stages.calibrate import read_calibration
from firesteel.stages.configure import algorithms
from firesteel.stages.line import Line
from firesteel.training.metrics import METRICS, read_metrics

_SHORT = 15  # minutes of training below which the report says that this is a demonstration


def run_facts(line: Line) -> Run:
    """The run, its target and this machine."""
    spec, recipe = line.target.spec, line.recipe
    return Run(
        recipe=recipe.name,
        seed=recipe.seed,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        command=_command(recipe.name),
        drafter=recipe.drafter.algorithm,
        temperature=recipe.evaluate.temperatures[0],
        max_new_tokens=recipe.evaluate.max_new_tokens,
        bootstrap=recipe.evaluate.bootstrap,
        target=TargetFacts(
            name=spec.name,
            revision=recipe.target.revision,
            fingerprint=spec.fingerprint,
            architecture=spec.architecture,
            parameters=sum(p.numel() for p in line.target.model.parameters()),
            layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            dtype=recipe.target.dtype,
        ),
        versions=package_versions(),
        machine=machine_facts(accelerator=torch.cuda.get_device_name() if line.target.device.type == "cuda" else None),
    )


def stage_seconds(line: Line) -> dict[str, float]:
    """Seconds of every stage before evaluation, from the manifests."""
    names = [
        "prompts",
        "responses",
        "hidden",
        *(train_stage.artifact_name(line, a) for a in algorithms(line)),
        "calibrate",
        "package",
    ]
    return {n: float(line.input(n).manifest.about["seconds"]) for n in names}


def _command(name: str) -> str:
    """What was typed, overrides included; from Python, the command that does the same."""
    typed = Path(sys.argv[0]).name == "firesteel" and len(sys.argv) > 2
    return shlex.join(["firesteel", *sys.argv[1:]]) if typed else f"firesteel run {name}"


def calibration_facts(artifact: Artifact) -> Calibration | None:
    """What calibration measured; None where the drafter has no confidence head."""
    found = read_calibration(artifact)
    return None if found is None else Calibration.model_validate(found["measured"])


def training_facts(artifact: Artifact) -> Training:
    """How a drafter was trained, from its artifact."""
    about = artifact.manifest.about
    points = [r for r in read_metrics(artifact / METRICS) if r["kind"] == "validation"]
    return Training(
        steps=about["steps"],
        seconds=about["train_seconds"],
        tokens=about["tokens"],
        stopped_by=about["stopped_by"],
        best_step=about["best_step"],
        curve=[TrainingPoint(step=p["step"], seconds=p["seconds"], acceptance_length=p["acceptance_length"]) for p in points],
    )


def notes_of(line: Line, agreement: Agreement | None, dropped: Dropped) -> list[str]:
    """What was found and left out, and what to expect, in words."""
    notes = [f"Acceptance length counts the target's own token: 1 means that no drafted token is ever accepted. {_agreement(agreement)}"]
    notes += [f"Left out: {text}." for text in dropped.lines()]
    notes += [f"{name} was not trained by this run: it is the checkpoint in {folder}." for name, folder in line.recipe.evaluate.checkpoints.items()]
    minutes = line.recipe.train.max_minutes
    if minutes is not None and minutes < _SHORT:
        notes.append(
            f"This drafter was trained for {minutes:g} minutes on few answers: it shows the line, not what a drafter can do. More answers and longer "
            "training keep raising the acceptance length; `firesteel run smollm2` is a longer recipe for this target."
        )
    return notes


def _agreement(found: Agreement | None) -> str:
    if found is None:
        return "Answers with and without the drafter were not compared."
    if found.differing == 0:
        return f"All {found.compared} greedy answers that were compared are the same with and without the drafter."
    return f"{found.differing} of {found.compared} greedy answers differ from those without the drafter: where two tokens nearly tie, rounding decides."
