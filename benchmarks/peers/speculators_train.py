"""Trains with the own trainer of speculators 0.9.0 for a wall-clock budget, on a machine that may lack CUDA. Runs in the peers' environment.

Data: an Arrow dataset and hidden states as export_states.py writes them. Everything is the peer's: command line, loaders,
model, loss, optimizer, schedule, validation, checkpoints. What a machine without CUDA needs is replaced, and nothing else:
the trainer's device (it takes the rank's number) and `torch.accelerator.synchronize`, with flags for what has no CPU code.

Its learning-rate schedule counts steps, not minutes. So a few steps, one validation and one checkpoint are timed first, outside the
budget; the number of steps that fit then becomes its `--max-steps`, over which its schedule decays. If the machine slows
down, its own graceful interrupt ends training at the budget and keeps the weights.

Usage: python benchmarks/peers/speculators_train.py --minutes 30 --save FOLDER -- OPTIONS OF `speculators train`
The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import speculators.train.cli as peer_cli
import speculators.train.trainer as peer_trainer
import torch
from speculators.train.config import TrainConfig

CPU_FLAGS = ["--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--hidden-states-dtype", "float32", "--num-workers", "0"]


@dataclass
class Timing:
    """What the timed steps showed."""

    step: float = 0.0
    validation: float = 0.0
    saving: float = 0.0
    batches: int = 0
    trained: list[float] = field(default_factory=list)  # end of each step of the real run, seconds from its start

    def plan(self, seconds: float) -> tuple[int, int]:
        """Steps and epochs that fit: every epoch ends with a validation and a checkpoint."""
        end = self.validation + self.saving
        whole, rest = divmod(seconds, self.batches * self.step + end)
        steps = max(1, int(whole) * self.batches + max(0, int((rest - end) / self.step)))
        return steps, -(-steps // self.batches)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--probe-steps", type=int, default=32, help="steps that are timed first, at most; the first of them is not counted")
    parser.add_argument("--probe-seconds", type=float, default=90.0, help="after so long four of them are enough")
    own, theirs = split(sys.argv[1:])
    options = parser.parse_args(own)
    sys.argv = [sys.argv[0]]
    if not torch.cuda.is_available():
        theirs = [*theirs, *CPU_FLAGS]
        peer_trainer.get_local_rank = lambda: torch.device("cpu")
        torch.accelerator.synchronize = lambda *_: None
    timing = Timing()
    run(theirs, options.save / "probe", probing(timing, options.probe_seconds), {"--max-steps": options.probe_steps, "--epochs": 1})
    steps, epochs = timing.plan(60 * options.minutes)
    costs = f"one step {timing.step:.2f} s, one validation {timing.validation:.1f} s, one checkpoint {timing.saving:.1f} s"
    print(f"{costs}: {steps} steps in {epochs} epochs of {timing.batches}", file=sys.stderr)
    run(theirs, options.save / "run", budgeted(timing, 60 * options.minutes), {"--max-steps": steps, "--epochs": epochs})
    print(json.dumps(report(options, theirs, timing, steps, epochs)))


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our options, and those after `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def run(theirs: list[str], save: Path, trainer: type, extra: dict[str, int]) -> None:
    """The peer's own `train`, with a trainer that measures."""
    peer_cli.Trainer = trainer
    argv = [*theirs, "--save-path", str(save), "--no-resume-from-checkpoint", *(str(w) for pair in extra.items() for w in pair)]
    peer_cli.main(TrainConfig.resolve(argv))
    gc.collect()


class _Enough(Exception):
    """The steps of a probe have been timed."""


def probing(timing: Timing, seconds: float) -> type:
    """A trainer that takes a few steps, validates once and saves once."""

    class Probe(peer_trainer.Trainer):  # type: ignore[misc]
        def run_training(self) -> None:
            ends: list[float] = []

            def count() -> None:
                ends.append(time.perf_counter())
                if len(ends) > 3 and ends[-1] - ends[0] > seconds:
                    raise _Enough

            with contextlib.suppress(_Enough):
                self.train_epoch(0, step_callback=count)
            started = time.perf_counter()
            self.val_epoch(0)
            timing.validation = time.perf_counter() - started
            saved = time.perf_counter()
            self.checkpointer.save_checkpoint(self.model, self.optimizers, 0)
            timing.saving = time.perf_counter() - saved
            timing.step = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else started - ends[0]
            timing.batches = len(self.train_loader)

    return Probe


def budgeted(timing: Timing, seconds: float) -> type:
    """The peer's trainer with an alarm clock: at the end of the budget it gets the signal that makes it save and stop."""

    class Budgeted(peer_trainer.Trainer):  # type: ignore[misc]
        def run_training(self) -> None:
            started = time.perf_counter()
            alarm = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGTERM))
            alarm.daemon = True
            own = self._optimizers_step
            self._optimizers_step = lambda: (own(), timing.trained.append(time.perf_counter() - started))
            alarm.start()
            try:
                super().run_training()
            finally:
                alarm.cancel()

    return Budgeted


def report(options: argparse.Namespace, theirs: list[str], timing: Timing, steps: int, epochs: int) -> dict[str, Any]:
    """What was trained, and where the weights are: the best by the peer's own validation if it says so, else the last."""
    folder = options.save / "run"
    best, interrupted = folder / "checkpoint_best", folder / "interrupted"
    numbered = sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    last = interrupted if interrupted.is_dir() else numbered[-1]
    return {
        "checkpoint": str((best if best.exists() else last).resolve()),
        "last_checkpoint": str(last.resolve()),
        "interrupted": interrupted.is_dir(),
        "minutes": options.minutes,
        "steps": len(timing.trained),
        "planned_steps": steps,
        "epochs": epochs,
        "batches_per_epoch": timing.batches,
        "seconds": timing.trained[-1] if timing.trained else 0.0,
        "step_seconds": timing.step,
        "validation_seconds": timing.validation,
        "saving_seconds": timing.saving,
        "options": theirs,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("speculators", "torch", "transformers")},
    }


if __name__ == "__main__":
    main()
