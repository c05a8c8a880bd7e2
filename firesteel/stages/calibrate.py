"""Stage `calibrate`: sequential temperature scaling of the confidence head on held-out rounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from firesteel.artifact import Artifact, ArtifactWriter, write_atomic
from firesteel.evaluation.calibration import fit_temperatures, measure_calibration
from firesteel.stages import extract
from firesteel.stages.extract import Listed
from firesteel.stages.line import Line
from firesteel.stages.stream import held_samples
from firesteel.stages.train import load_trained, make_job, take
from firesteel.training.data import held_out_batches
from firesteel.training.loop import run_validation
from firesteel.training.validation import Validation

NAME = "calibrate"
_FILE = "calibration.json"


def run(line: Line) -> Artifact:
    """Fit one temperature per drafted position; a drafter without a confidence head has none to fit."""
    hidden, trained = extract.open_hidden(line), line.input("train")
    extract.check_input(trained, "hidden states", trained.manifest.inputs.get("hidden"), hidden.manifest.content, "train")
    settings = {"calibrate": line.recipe.calibrate.model_dump()}
    return line.stage(NAME, settings, {"hidden": hidden.manifest.content, "train": trained.manifest.content}, lambda w: _make(line, w, hidden, trained))


def read_calibration(artifact: Artifact) -> dict[str, Any] | None:
    """Temperatures and measurement, or None where the drafter has no confidence head."""
    return json.loads((artifact / _FILE).read_text())


def _make(line: Line, writer: ArtifactWriter, hidden: Artifact, artifact: Artifact) -> dict[str, Any]:
    settings = line.recipe.calibrate
    trained = load_trained(line, line.recipe.drafter.algorithm, artifact)
    if not trained.config.confidence_head:
        _write(line, writer, None)
        line.screen.say("calibrate: this drafter has no confidence head, nothing to do")
        return {"temperatures": None}
    listed = take(extract.read_index(hidden, "validation"), settings.tokens)
    # One half fits, the other judges: figures on the rounds that were fitted on would flatter.
    fitted, judged = split_in_domains(listed)
    parts = []
    job = make_job(line, writer.path, trained.config, trained.vocab, hidden, lambda values: None, tokens=1)
    job.drafter = trained.drafter.to(line.target.device)
    with closing(job.source) as source:
        for half in (fitted, judged or fitted):
            keys = [d.key for d in half]
            job.held_out = held_out_batches(held_samples(line, hidden, source.store, keys), keys, source.layout, batch_tokens=line.recipe.train.batch_tokens)
            found = run_validation(job, keep_blocks=True)
            parts.append(_arrays(found))
    temperatures = fit_temperatures(*parts[0], bins=settings.bins)
    measured_on = f"{len(judged)} validation documents that were not fitted on" if judged else "the one validation document it was fitted on"
    measured = measure_calibration(*parts[1], temperatures=temperatures, bins=settings.bins, measured_on=measured_on)
    _write(line, writer, {"temperatures": temperatures, "measured": measured.model_dump(mode="json")})
    scaled = [round(t, 2) for t in temperatures]
    errors = f"{_show(measured.ece_before)} -> {_show(measured.ece_after)}"
    line.screen.say(f"calibrate: temperatures {scaled}, ECE {errors}, AUC {_show(measured.auc_after)}")
    return {"temperatures": temperatures}


def split_in_domains(listed: Sequence[Listed]) -> tuple[list[Listed], list[Listed]]:
    """Two halves with the same domains: a domain's documents go to them in turn. Every second domain begins with the second half, so that
    odd ones do not all make the first one larger."""
    halves: tuple[list[Listed], list[Listed]] = [], []
    turns: dict[str, int] = {}
    for d in listed:
        turn = turns.setdefault(d.domain, len(turns))
        halves[turn % 2].append(d)
        turns[d.domain] += 1
    return halves


def _write(line: Line, writer: ArtifactWriter, found: dict[str, Any] | None) -> None:
    if line.world.first:  # all processes have found the same
        write_atomic(writer / _FILE, json.dumps(found))


def _arrays(found: Validation) -> tuple[Any, Any, Any]:
    """Evaluated blocks as arrays `[R, g]`; blocks that the end of the answer cuts are left out where there are others."""
    assert found.confidence_logits is not None, "a confidence head gives logits"
    assert found.survived is not None
    assert found.valid is not None
    whole = found.valid.all(1)
    rows = whole if bool(whole.any()) else torch.ones_like(whole)
    logits, survived, valid = (t[rows].cpu().numpy() for t in (found.confidence_logits.double(), found.survived, found.valid))
    return logits, survived.astype(np.bool_), valid.astype(np.bool_)


def _show(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
