"""Unattended: what is noticed, what is done about it, and what is told."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import launch, make_job

from firesteel import recipe as recipes
from firesteel.errors import ResourceError, TrainingError
from firesteel.training import loop, watch
from firesteel.training.checkpoint import Progress
from firesteel.training.events import EventLog, read_events
from firesteel.training.guards import StepGuard
from firesteel.training.journal import journal
from firesteel.training.loop import train
from firesteel.training.parallel import open_world
from firesteel.training.step import Gradients, TrainJob
from firesteel.training.validation import Validation
from firesteel.training.watch import Lookout

STEPS = {"max_steps": 60, "validate_every": 30}


def guarded(losses: list[float], **settings: Any) -> tuple[list[str], Progress]:
    guard, progress, verdicts = StepGuard(recipes.Watch(**settings), 10), Progress(), []
    for loss in losses:
        verdicts.append(guard.judge(progress, loss, 1.0)[0])
        progress.step += 1
    return verdicts, progress


def test_a_spike_is_skipped_and_many_are_a_reason_to_go_back() -> None:
    usual = [3.0 - 0.02 * i for i in range(30)]
    verdicts, progress = guarded([*usual, 5.6, 2.4, 99.0, math.nan, 2.4, 7.0, 6.0], spikes=5)
    assert verdicts == ["take"] * 30 + ["skip", "take", "skip", "skip", "take", "skip", "return"]
    assert (progress.spiked, progress.skipped) == (4, 1)
    assert guarded([*usual, 5.6], spike=None)[0][-1] == "take"
    assert guarded([3.0] * 19 + [50.0])[0][-1] == "take", "nothing is usual yet"
    far = [2.0] * 20 + ([9.0] + [2.0] * 49) * 6
    assert "return" not in guarded(far, spikes=2)[0], "spikes far apart are no trouble"


@pytest.mark.parametrize(("best", "now", "falls"), [(1.8, 1.6, True), (1.8, 1.65, False), (1.05, 1.0, False), (1.8, 1.85, False)])
def test_a_fall_of_acceptance(best: float, now: float, falls: bool) -> None:
    assert StepGuard(recipes.Watch(fall=0.2), 10).falls(Progress(best=best), now) == falls
    assert not StepGuard(recipes.Watch(fall=None), 10).falls(Progress(best=best), now)


def spiked(monkeypatch: pytest.MonkeyPatch, steps: set[int], loss: float = 1e3) -> None:
    """In these steps the loss is far off, and so are the gradients."""
    real, numbers = loop.gradients, itertools.count(1)

    def gradients(job: TrainJob, *args: Any) -> Gradients:
        found = real(job, *args)
        if next(numbers) in steps:
            for p in job.drafter.parameters():
                if p.grad is not None:
                    p.grad.mul_(1e6)
            found.loss = loss
        return found

    monkeypatch.setattr(loop, "gradients", gradients)


def rules(folder: Path) -> list[str]:
    return [e.rule for e in read_events(folder) if e.rule != "run"]


def test_one_spike_leaves_no_trace_in_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spiked(monkeypatch, {40})
    job = make_job(tmp_path, **{**STEPS, "max_steps": 40, "validate_every": 39})
    before: dict[str, torch.Tensor] = {}

    def on_step(values: dict[str, Any]) -> None:
        if values.get("step") == 39 and "done" in values:
            before.update({name: t.clone() for name, t in job.drafter.state_dict().items()})

    job.on_step = on_step
    result = train(job)
    assert (result.progress.spiked, result.progress.returns) == (1, 0)
    assert all(t.equal(before[name]) for name, t in job.drafter.state_dict().items())
    assert rules(tmp_path) == ["spike"]


def test_many_spikes_take_the_weights_back_and_lower_the_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spiked(monkeypatch, {33, 34, 35})
    job = make_job(tmp_path, **STEPS)
    job.watch = recipes.Watch(spikes=3)
    told: list[str] = []
    seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_step(values: dict[str, Any]) -> None:
        if "alarm" in values:
            told.append(values["alarm"])
        elif "done" in values:
            seen[values["step"]] = {name: t.clone() for name, t in job.drafter.state_dict().items()}

    job.on_step = on_step
    result = train(job)
    assert result.progress.step == 60, "the clock does not go back"
    assert (result.progress.returns, result.progress.rate) == (1, 0.5)
    assert all(t.equal(seen[30][name]) for name, t in seen[35].items())
    assert not all(t.equal(seen[30][name]) for name, t in seen[32].items())
    assert rules(tmp_path) == ["spike"] * 4
    assert told[-1].startswith("step 35: 3 of the last 50 steps were not taken: weights are those of step 30 again, learning rates 0.5 times")
    page = journal(tmp_path, "a drafter")
    assert "Alarms: 4 spike." in page
    assert "weights are those of step 30 again" in page
    assert "| 60 |" in page


def test_trouble_without_end_stops_with_the_good_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last return it stops; the newest state is the good one, and the same command goes on from there."""
    job = make_job(tmp_path, **STEPS)
    job.watch = recipes.Watch(spikes=2, returns=1)
    with monkeypatch.context() as m:
        spiked(m, {32, 33, *range(54, 60)})
        with pytest.raises(TrainingError, match=r"after 1 returns.*watch.returns=1"):
            train(job)
    again = make_job(tmp_path, **STEPS)
    again.watch = job.watch
    seen: list[int] = []
    again.on_step = lambda values: seen.append(values["step"]) if "done" in values else None
    assert train(again).progress.step == 60
    assert seen[0] == 56
    told = [e.what for e in read_events(tmp_path) if e.rule == "run"]
    assert "after 1 returns" in told[1]
    assert told[2].startswith("training goes on")
    assert told[3].startswith("training ends (budget)")
    assert "Started 2 time(s)" in journal(tmp_path, "a drafter")


def test_without_a_good_state_training_goes_on_at_the_new_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, numbers = loop.gradients, itertools.count(1)

    def gradients(job: TrainJob, *args: Any) -> Gradients:  # other data from step 25 on
        found = real(job, *args)
        found.loss *= 1.0 if next(numbers) < 25 else 50.0
        return found

    monkeypatch.setattr(loop, "gradients", gradients)
    job = make_job(tmp_path, **{**STEPS, "max_steps": 50, "validate_every": 50})
    result = train(job)
    assert (result.progress.spiked, result.progress.returns) == (5, 0)
    assert "no good state yet" in read_events(tmp_path)[-2].did


def test_a_fall_in_validation_takes_the_weights_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lengths = loop.run_validation, iter([1.5, 1.2, 1.55, 1.5])

    def validation(job: TrainJob) -> Validation:
        return replace(real(job), acceptance_length=next(lengths))

    monkeypatch.setattr(loop, "run_validation", validation)
    result = train(make_job(tmp_path, **{**STEPS, "max_steps": 15, "validate_every": 5}))
    assert (result.progress.returns, result.progress.best) == (1, 1.55)
    assert [(e.rule, e.step) for e in read_events(tmp_path) if e.rule != "run"] == [("falling", 10)]


def _goes_back(folder: Path, parallel: str) -> None:
    world = open_world()
    with pytest.MonkeyPatch.context() as m:
        spiked(m, {33, 34})
        job = make_job(folder, "dspark", world, parallel=parallel, **STEPS)
        job.watch = recipes.Watch(spikes=2)
        result = train(job)
    assert (result.progress.returns, result.progress.step) == (1, 60)


@pytest.mark.processes
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_go_back_together(tmp_path: Path, parallel: str) -> None:
    launch(2, _goes_back, tmp_path, parallel)
    assert rules(tmp_path) == ["spike"] * 3


def row(url: str, **changes: Any) -> dict[str, Any]:
    return {"url": url, "state": "up", "flying": 1, "answers": 5, "faults": 0, "bad": 0, "tokens_per_second": 100.0, "error": "", **changes}


def test_what_rank_0_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trouble is told once, when it has been seen twice, and its end once."""
    clock = itertools.count(0.0, 61.0)
    monkeypatch.setattr(watch.time, "monotonic", lambda: next(clock))
    rows, free, said = [row("http://a"), row("http://b")], [1e9], []
    lookout = Lookout(recipes.Watch(), EventLog(tmp_path), said.append, lambda: rows, lambda: int(free[0]))
    waited = 0.0

    def look(share: float = 0.0, **b: Any) -> list[str]:
        nonlocal waited
        waited += 61.0 * share
        rows[1] = row("http://b", **b)
        del said[:]
        lookout.look(7, waited, 10**8)
        return [text.removeprefix("step 7: ") for text in said]

    assert look() == look() == look(state="resting", error="gone") == []
    assert look(state="resting", error="gone away") == ["http://b fails: gone away: it rests, and is tried again ever more rarely"]
    assert look(state="trying", error="gone") == look() == []
    assert look() == ["http://b is well again: it is in full use"]
    assert look(tokens_per_second=20.0) == []
    assert look(tokens_per_second=20.0) == ["http://b gives 20 tokens/s, the others 100: the others get more"]
    assert look() == []
    assert look() == ["http://b is well again: it is in full use"]
    assert look(0.8)[0].startswith("training waited for samples 80% of the last minute, 2 of 2 servers up: it goes on; `firesteel endpoints")
    assert look(0.9) == look(0.4) == []
    assert look(0.1) == ["training waited for samples 10% of the last minute: enough come again"]
    free[0] = 2.5e8
    assert look() == ["the disk has 0.25 GB left, a state takes 0.10: states are saved 4 times as rarely"]
    assert (look(), lookout.rarer, lookout.full) == ([], 4, False)
    free[0] = 1.1e8
    assert (look(), lookout.full) == ([], True)
    assert len(read_events(tmp_path)) == 7


def test_the_target_in_this_process_starves_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 61.0)
    monkeypatch.setattr(watch.time, "monotonic", lambda: next(clock))
    said: list[str] = []
    lookout = Lookout(recipes.Watch(), EventLog(tmp_path), said.append, lambda: [row("local")], lambda: 10**9)
    for waited in (0.0, 60.0, 120.0):
        lookout.look(1, waited, 1)
    assert said == []


def test_documents_learnt_by_heart_are_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    lookout = Lookout(recipes.Watch(), EventLog(tmp_path), said.append, list, lambda: 10**9)
    lookout.compare(5, 0.1, 0.1)  # nothing is known of training yet
    for right in (0.5, 0.6):
        lookout.saw(right)
    lookout.compare(6, 0.45, 0.9)  # ahead by 10 points before anything can be known by heart
    lookout.compare(7, 0.31, 1.5)
    assert said == []
    lookout.compare(8, 0.29, 2.0)
    lookout.compare(9, 0.2, 2.1)
    assert len(said) == 1
    assert said[0].startswith("step 8: the first draft is right for 55% of training and 29% of validation: documents are learnt by heart")


@pytest.mark.parametrize(("easier", "told"), [(None, 0), (0.2, 0), (0.0, 1)])
def test_after_a_resume_the_first_pass_is_remembered_or_nothing_is_said(tmp_path: Path, easier: float | None, told: int) -> None:
    said: list[str] = []
    lookout = Lookout(recipes.Watch(), EventLog(tmp_path), said.append, list, lambda: 10**9)
    lookout.easier = easier
    lookout.saw(0.6)
    lookout.compare(9, 0.4, 2.5)
    assert len(said) == told


def test_documents_of_another_kind_are_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    lookout = Lookout(recipes.Watch(), EventLog(tmp_path), said.append, list, lambda: 10**9)
    lookout.saw(0.5)
    lookout.compare(6, 0.36, 0.4)
    assert said == []
    lookout.compare(7, 0.34, 0.8)
    lookout.compare(8, 0.33, 0.9)
    lookout.compare(9, 0.33, 3.0)  # no further ahead than then
    assert len(said) == 1
    assert "within the first pass: training's documents are of another kind" in said[0]


def test_a_disk_with_room_for_one_state_ends_training_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PERIOD", 0.0)
    monkeypatch.setattr(loop, "free_bytes", lambda _: lambda: 1000)
    with pytest.raises(ResourceError, match="room for one training state"):
        train(make_job(tmp_path, **STEPS))
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["000000002"], "seen after the first step, stopped after the second"
    monkeypatch.undo()
    assert train(make_job(tmp_path, **STEPS)).progress.step == 60
