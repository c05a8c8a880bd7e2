"""States of a run: whole or not there, for any number of processes, and only for the recipe that made them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import launch, make_job, train_here
from safetensors.torch import load_file
from test_parallel_curves import check_same
from torch.distributed import checkpoint as dcp

from firesteel.errors import ArtifactError, TrainingError
from firesteel.training import checkpoint, loop, step
from firesteel.training.checkpoint import Progress, Saver
from firesteel.training.loop import train
from firesteel.training.metrics import read_metrics
from firesteel.training.optimizer import Optimizers
from firesteel.training.parallel import open_world

EACH_STEP = {"checkpoint_minutes": 1e-9}


def states(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "state").iterdir())


def interrupted(folder: Path, settings: dict[str, Any]) -> None:
    """Train for two steps, save, and stop there as if killed."""
    world = open_world()
    job = make_job(folder, "dspark", world, **settings)
    real, steps = Optimizers.step, []

    def stop(self: Optimizers) -> None:
        steps.append(1)
        if len(steps) == 4:
            raise InterruptedError("killed")
        real(self)

    Optimizers.step = stop  # type: ignore[method-assign]
    try:
        with pytest.raises(InterruptedError):
            train(job)
    finally:
        Optimizers.step = real  # type: ignore[method-assign]


SHAPES = {"one": (1, {"accumulate": 2}), "ddp": (2, {"parallel": "ddp"}), "fsdp": (2, {"parallel": "fsdp"})}


@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), [("one", "fsdp"), ("fsdp", "one"), ("ddp", "fsdp"), ("fsdp", "ddp"), ("ddp", "one")])
def test_a_state_is_resumed_by_other_processes(before: str, after: str, tmp_path: Path) -> None:
    """Stopped after three steps and gone on with in another way: the curve and the weights are the undisturbed run's."""
    settings = {"optimizer": "muon"}
    train_here(tmp_path / "whole", "dspark", {**settings, "accumulate": 2})
    count, own = SHAPES[before]
    run(count, interrupted, tmp_path / "cut", {**settings, **own})
    assert states(tmp_path / "cut") == ["000000003"]
    count, own = SHAPES[after]
    run(count, train_here, tmp_path / "cut", "dspark", {**settings, **own})
    check_same(tmp_path / "whole", tmp_path / "cut")


def run(count: int, work: Any, *args: Any) -> None:
    work(*args) if count == 1 else launch(count, work, *args)


def test_one_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = {"optimizer": "muon", **EACH_STEP}
    train_here(tmp_path / "whole", "dspark", settings)
    interrupted(tmp_path / "cut", settings)
    train_here(tmp_path / "cut", "dspark", settings)
    found, wanted = load_file(tmp_path / "cut" / "best.safetensors"), load_file(tmp_path / "whole" / "best.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())
    facts = json.loads((tmp_path / "cut" / "state" / states(tmp_path / "cut")[-1] / "facts.json").read_text())
    assert (facts["progress"]["batch"], facts["processes"]) == (6, 1)


@pytest.mark.parametrize("moment", ["in the middle of a step", "between steps"])
def test_an_interrupt_saves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Ctrl-C while the optimizer moves the weights: the state before counts, and the run ends as the undisturbed one."""
    train_here(tmp_path / "whole", "dspark", {})
    owner, name = (Optimizers, "step") if moment == "in the middle of a step" else (loop, "settle")
    real, calls = getattr(owner, name), []

    def interrupt(*args: Any) -> Any:
        found = real(*args)
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_here(tmp_path / "cut", "dspark", {})
    assert ("000000004" in states(tmp_path / "cut")) == (moment == "between steps")
    train_here(tmp_path / "cut", "dspark", {})
    found, wanted = load_file(tmp_path / "cut" / "best.safetensors"), load_file(tmp_path / "whole" / "best.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())


def test_a_step_may_be_saved_twice(tmp_path: Path) -> None:
    """At no time is there none: the second one has a name of its own until the first is gone."""
    job = make_job(tmp_path)
    saver = saver_of(job)
    for seconds in (1.0, 2.0):
        saver.begin(Progress(step=4, seconds=seconds))
        saver.finish()
    assert states(tmp_path) == ["000000004+"]
    again = saver_of(job)
    assert again.load().seconds == 2.0
    again.begin(Progress(step=4, seconds=3.0))
    again.finish()
    assert states(tmp_path) == ["000000004++"]


def test_random_state_comes_back(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    saver = saver_of(job)
    torch.manual_seed(5)
    saver.begin(Progress(step=1))
    wanted = torch.rand(3)
    saver.finish()
    torch.manual_seed(6)
    assert saver_of(job).load().step == 1
    assert torch.rand(3).equal(wanted)


def test_a_state_of_another_recipe_is_refused_with_both_values(tmp_path: Path) -> None:
    interrupted(tmp_path, {})
    with pytest.raises(ArtifactError, match=r"train\.lr is 0\.003 there and 0\.004 here") as e:
        train(make_job(tmp_path, lr=4e-3))
    assert "delete" in str(e.value)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, {})
    (tmp_path / "state" / "000000003" / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(ArtifactError, match="corrupt"):
        train(make_job(tmp_path))


def test_a_full_disk_keeps_the_last_state_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, told = make_job(tmp_path, **EACH_STEP), []
    job.on_step = told.append
    real, writes = dcp.FileSystemWriter.write_data, []

    def full(self: dcp.FileSystemWriter, *args: Any) -> Any:
        writes.append(1)
        if len(writes) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    monkeypatch.setattr(Saver, "busy", property(lambda self: self.finish() or False))  # every step is saved
    train(job)
    assert states(tmp_path) == ["000000001"]
    warnings = [t["alarm"] for t in told if "alarm" in t]
    assert len(warnings) >= 3
    assert "No space left on device" in warnings[0]
    assert "the last one is kept" in warnings[0]
    assert [t["step"] for t in told if "done" in t] == [1, 2, 3, 4, 5, 6]


def _full_on_one_rank(folder: Path) -> None:
    world, told, writes = open_world(), [], []
    real = dcp.FileSystemWriter.write_data

    def write(self: dcp.FileSystemWriter, *args: Any) -> Any:
        writes.append(1)
        if world.rank == 1 and len(writes) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args)

    dcp.FileSystemWriter.write_data = write  # type: ignore[method-assign]
    job = make_job(folder, "dspark", world, parallel="fsdp", max_steps=4, validate_every=1)  # every validation is followed by a state
    job.on_step = told.append
    assert train(job).progress.step == 4
    assert any("No space left on device" in t.get("alarm", "") for t in told)


@pytest.mark.processes
def test_a_disk_that_is_full_for_one_rank(tmp_path: Path) -> None:
    """No half of a state is taken for one; nobody waits for the rank that failed."""
    launch(2, _full_on_one_rank, tmp_path)
    assert states(tmp_path) == ["000000001"]


@pytest.mark.processes
def test_a_save_that_never_ends_leaves_the_one_before(tmp_path: Path) -> None:
    """kill -9 while a state is written: the next start finds the last whole one, and sweeps the rest away."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import sys, os, signal, pathlib\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from parallel_cases import make_job, train\n"
        "from torch.distributed import checkpoint as dcp\n"
        "real, writes = dcp.FileSystemWriter.finish, []\n"
        "def finish(self, *args, **kwargs):\n"
        "    writes.append(1)\n"
        "    if len(writes) == 2:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(self, *args, **kwargs)\n"
        "dcp.FileSystemWriter.finish = finish\n"
        "train(make_job(pathlib.Path(sys.argv[1]), checkpoint_minutes=1e-9))\n"
    )
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "run")], check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    found = states(tmp_path / "run")
    assert len(found) == 2
    assert found[1].endswith(".tmp")
    job = make_job(tmp_path / "run")
    assert saver_of(job).load().step == int(found[0])
    assert states(tmp_path / "run") == found[:1]


def test_the_optimizer_waits_for_the_copy_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and files do not wait for each other; what is saved is what was there when saving began."""
    job = make_job(tmp_path)
    saver, release = saver_of(job), threading.Event()
    real = checkpoint._copy
    monkeypatch.setattr(checkpoint, "_copy", lambda tensor: release.wait() and real(tensor))
    saver.begin(Progress(step=1))
    share = step.gradients(job, 0, step.LossWeights(ce=1.0))
    assert share.loss > 0
    assert saver.busy
    threading.Timer(0.2, release.set).start()
    started = time.monotonic()
    saver.let_copy()
    assert time.monotonic() - started > 0.1
    wanted = {name: t.clone() for name, t in job.drafter.state_dict().items()}
    with torch.no_grad():
        for parameter in job.drafter.parameters():
            parameter.add_(1.0)
    saver.finish()
    assert saver.held > 0.1
    assert saver_of(job).load().step == 1
    assert all(t.equal(wanted[name]) for name, t in job.drafter.state_dict().items())


def test_too_many_steps_that_are_not_finite_keep_the_state(tmp_path: Path) -> None:
    job = make_job(tmp_path, nonfinite_budget=1)
    saver = saver_of(job)
    saver.begin(Progress(step=0))
    saver.finish()
    with torch.no_grad():
        job.tables.head.fill_(float("nan"))
    with pytest.raises(TrainingError, match="nonfinite_budget"):
        train(job)
    assert states(tmp_path) == ["000000000"]
    assert read_metrics(tmp_path / "metrics.jsonl")


def saver_of(job: step.TrainJob) -> Saver:
    return Saver(job.folder, job.drafter, Optimizers(job.drafter, job.train), job.world, job.settings)
