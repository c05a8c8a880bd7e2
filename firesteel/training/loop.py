"""The training loop: next batches, gradients, clip, step, log, validate, save."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firesteel.batches.batch import Batch
from firesteel.errors import FiresteelError, ResourceError, TrainingError
from firesteel.kernels.memory import map_large_blocks
from firesteel.losses.types import LossResult
from firesteel.training.checkpoint import PATIENCE, Progress, Saver, save_best
from firesteel.training.events import EventLog
from firesteel.training.guards import WINDOW, StepGuard
from firesteel.training.metrics import MetricsLog
from firesteel.training.optimizer import Optimizers, lr_scale
from firesteel.training.replica import Replica, wants_shards
from firesteel.training.schedule import loss_weights, progress_of
from firesteel.training.status import Metrics, Status, endpoints_of, read_status
from firesteel.training.step import Gradients, TrainJob, compute_loss, gradients, loss_of, settle
from firesteel.training.validation import Validation, validate
from firesteel.training.watch import Lookout, free_bytes

_LOG_EVERY = 10
_LARGE_VOCAB = 16384


@dataclass
class TrainResult:
    """What a finished run tells.

    Attributes:
        saves: states that this process took part in saving.
        saving: seconds that training waited for them.
    """

    progress: Progress
    stopped_by: str
    final: Validation
    saves: int
    saving: float


def train(job: TrainJob) -> TrainResult:
    """Train until the budget is used or validation stops improving. Resumes from `job.folder`.

    The best weights, by validation acceptance length, are left in `job.folder`. In a world of several processes all of them call this; rank 0's
    clock is everyone's, and whatever a rank decides follows from sums over all ranks, so that all decide alike.

    Raises:
        TrainingError: too many non-finite steps.
        ArtifactError: the state found is of another recipe, or damaged.
    """
    prepare_memory(job)
    spread(job)
    optimizers = Optimizers(job.drafter, job.train, job.world)
    saver = Saver(job.folder, job.drafter, optimizers, job.world, job.settings)
    progress = saver.load()
    guard = StepGuard(job.watch, job.train.nonfinite_budget)
    log = MetricsLog(job.folder, progress.step) if job.world.first else None
    watch = open_lookout(job)
    watch.easier = progress.easier
    started = time.monotonic() - progress.seconds
    saved_at, stopped_by = progress.seconds, "budget"
    watch.tell(progress.step, "run", f"training {'goes on' if progress.step else 'begins'} with {job.world.size} process(es)", "")
    status, metrics = open_status(job)
    try:
        while True:
            epoch = job.source.epoch_of(progress.batch)
            done = status.values["done"] = progress_of(job.train, step=progress.step, epoch=epoch, seconds=progress.seconds)
            due = progress.step % job.train.validate_every == 0 or done >= 1.0
            if due and progress.step > 0 and progress.last_validation != progress.step:
                found = _validate(job, progress, log)
                status.values["validation"] = length = found.acceptance_length
                watch.compare(progress.step, found.conditional[0], epoch)
                progress.easier = watch.easier
                if guard.falls(progress, length):
                    _go_back(job, saver, progress, watch, "falling", f"acceptance length {length:.3f} in validation, {progress.best:.3f} at best")
                else:
                    saver.begin(progress, good=progress.since_best == 0)
                if job.train.patience is not None and progress.since_best >= job.train.patience:
                    stopped_by = "patience"
                    break
            if done >= 1.0:
                break
            weights = loss_weights(job.loss, done)
            optimizers.set_scale(progress.rate * lr_scale(done, job.train.warmup, job.train.final_lr))
            optimizers.zero_grad()
            share = gradients(job, progress.batch, weights)
            clock, rarer = (time.monotonic() - started, float(watch.rarer)) if job.world.first else (0.0, 0.0)
            shares = [share.loss, share.denominator, clock, float(saver.busy), float(watch.full), rarer]
            loss, denominator, seconds, saving, full, rarer = job.world.sums(shares)
            norm = settle(job.drafter, denominator or 1.0, job.train.clip)
            loss /= denominator or 1.0
            saver.let_copy()
            verdict, rule, why = guard.judge(progress, loss, norm)
            with saver.changing():
                if verdict == "take":
                    optimizers.step()
                progress.step += 1
                progress.batch += job.batches_per_step
                progress.seconds = seconds
            if verdict != "take":
                watch.tell(progress.step, rule, why, "the step is not taken")
                if verdict == "return":
                    _go_back(job, saver, progress, watch, rule, f"{len(progress.troubles)} of the last {WINDOW} steps were not taken")
            _report(job, progress, log, share, loss, norm, done, saver, watch)
            status.update(share.tokens, {"loss": loss, "state_step": saver.at, **_facts(job, progress)})
            watch.look(progress.step, job.source.waited, saver.size)
            if full:
                saver.begin(progress)
                raise ResourceError(
                    f"step {progress.step}: the disk of {job.folder} has room for one training state: it is saved, and training stops",
                    mend="free some space; the same command resumes",
                )
            if seconds - saved_at > 60 * rarer * job.train.checkpoint_minutes and not saving:
                saver.begin(progress)
                saved_at = seconds
        saver.finish()
    except KeyboardInterrupt:
        # Several ranks are interrupted at different steps, and a step in the middle is neither the one nor the next: there the last state counts.
        if job.world.size == 1 and saver.whole:
            saver.begin(progress)
        watch.tell(progress.step, "run", "interrupted", "the same command goes on")
        raise
    except FiresteelError as e:
        watch.tell(progress.step, "run", e.message, "training stops")
        raise
    finally:
        saver.finish(PATIENCE)
        status.values["state_step"] = saver.at
        status.write()
        if metrics is not None:
            metrics.close()
        if log is not None:
            log.close()
    watch.tell(progress.step, "run", f"training ends ({stopped_by}), best acceptance length {progress.best:.3f} at step {progress.best_step}", "")
    return TrainResult(progress, stopped_by, run_validation(job), saver.saves, saver.held)


def open_lookout(job: TrainJob) -> Lookout:
    """Rank 0 looks out for all, at the servers of other ranks through what these say of themselves."""

    def endpoints() -> list[dict[str, Any]]:
        others = [r for r in read_status(job.folder) if r["rank"] != job.world.rank] if job.world.size > 1 else []
        return endpoints_of([{"age": 0.0, "endpoints": job.source.endpoints()}, *others])

    log = EventLog(job.folder) if job.world.first else None
    return Lookout(job.watch, log, lambda text: job.on_step({"alarm": text}), endpoints, free_bytes(job.folder))


def open_status(job: TrainJob) -> tuple[Status, Metrics | None]:
    """What this rank says of itself to the outside."""
    status = Status(job.folder, job.world.rank, job.world.size, job.source.endpoints)
    port = job.watch.metrics_port
    return status, None if port is None else Metrics(status, job.watch.metrics_host, port)


def _facts(job: TrainJob, progress: Progress) -> dict[str, Any]:
    """Of the status: where training stands, and its samples."""
    names = ("step", "seconds", "best", "best_step", "skipped", "spiked", "returns", "rate")
    return {name: getattr(progress, name) for name in names} | {"held": job.source.held, "waited": job.source.waited}


def _go_back(job: TrainJob, saver: Saver, progress: Progress, watch: Lookout, rule: str, why: str) -> None:
    """Weights and optimizer become those of the last good state again, at lower rates; step, clock and data go on.

    Raises:
        TrainingError: it has happened too often. The good state is the newest then.
    """
    at = saver.go_back()
    progress.losses, progress.troubles = [], []  # what is usual is to be found out anew
    if at is None:
        watch.tell(progress.step, rule, why, "there is no good state yet to go back to: training goes on")
        return
    spent = progress.returns >= job.watch.returns
    if not spent:
        progress.returns += 1
        progress.rate *= job.watch.rate
    saver.begin(progress, good=True)
    if spent:
        saver.finish()
        raise TrainingError(
            f"step {progress.step}: {why}, after {progress.returns} returns to a good state (watch.returns={job.watch.returns})",
            mend="lower train.lr and train.muon_lr, or look for bad rows with `firesteel check RECIPE`; "
            f"the state of step {at} is kept and the same command resumes from it",
        )
    watch.tell(progress.step, rule, why, f"weights are those of step {at} again, learning rates {progress.rate:g} times the recipe's")


def spread(job: TrainJob) -> None:
    """Let the processes of a world train the job's drafter together."""
    if job.world.size > 1:

        def loss(batch: Batch, weights: Any, denominator: float | None) -> tuple[LossResult, Tensor | None]:
            return compute_loss(job, batch, weights, denominator)

        sharded = wants_shards(job.train.parallel, job.drafter, job.device, job.world)
        job.replica = Replica(job.drafter, loss, sharded=sharded, device=job.device, world=job.world)


def prepare_memory(job: TrainJob) -> None:
    """With a large vocabulary on a CPU, keep the allocator from piling up what steps free."""
    if job.tables.head.device.type == "cpu" and job.tables.head.shape[0] >= _LARGE_VOCAB:
        map_large_blocks()


def run_validation(job: TrainJob, *, keep_blocks: bool = False) -> Validation:
    """Evaluate the drafter as it is on the held-out batches; every rank takes its share, and all get the whole."""
    job.drafter.eval()
    anchored = job.drafter.config.sample_from_anchor
    found = validate(_evaluated(job), sample_from_anchor=anchored, eos_ids=job.eos_ids, keep_blocks=keep_blocks, world=job.world)
    job.drafter.train()
    return found


@torch.no_grad()
def _evaluated(job: TrainJob) -> Iterable[tuple[Batch, LossResult, Tensor | None]]:
    """Batches rank, rank + size, ... of the held-out ones."""
    weights, size = loss_weights(job.loss, 1.0), job.world.size
    for first in range(0, len(job.held_out), size):
        number = first + job.world.rank
        # A rank without a batch repeats the last one and says nothing: with shards, every rank must be there at every forward pass.
        batch = job.held_out[min(number, len(job.held_out) - 1)].to(job.device)
        result, confidence = loss_of(job, batch, weights)
        if number < len(job.held_out):
            yield batch, result, confidence


def _validate(job: TrainJob, progress: Progress, log: MetricsLog | None) -> Validation:
    """Validate, and keep the best weights."""
    found = run_validation(job)
    progress.last_validation = progress.step
    if found.acceptance_length > progress.best:
        progress.best, progress.best_step, progress.since_best = found.acceptance_length, progress.step, 0
        save_best(job.folder, job.drafter, job.world)
    else:
        progress.since_best += 1
    values = {
        "acceptance_length": found.acceptance_length,
        "expected_length": found.expected_length,
        "loss": found.loss,
        "conditional": found.conditional,
        "seconds": progress.seconds,
    }
    if log is not None:
        log.write("validation", progress.step, values)
    job.on_step({"validation": found.acceptance_length, "best": progress.best, "step": progress.step})
    return found


def _report(
    job: TrainJob, progress: Progress, log: MetricsLog | None, share: Gradients, loss: float, norm: float, done: float, saver: Saver, watch: Lookout
) -> None:
    values: dict[str, Any] = {
        "loss": loss,
        "grad_norm": norm,
        "seconds": progress.seconds,
        "skipped": progress.skipped,
        "saving": saver.held,
        "saves": saver.saves,
    }
    if log is not None and (progress.step % _LOG_EVERY == 0 or progress.step == 1):
        means = _means(share.last)
        watch.saw(next((right for right in means["correct_per_slot"] if right > 0), 0.0))  # DFlash's slot 0 drafts nothing
        log.write("train", progress.step, values | means | job.source.report())
    warning = saver.error()
    if warning is not None:
        watch.tell(progress.step, "checkpoint", warning, "training goes on")
    job.on_step({"step": progress.step, "done": done, "loss": loss, "best": progress.best, "seconds": progress.seconds})


def _means(result: LossResult) -> dict[str, Any]:
    """Means over valid slots, and per slot the share of true tokens that the draft would choose."""
    valid = result.valid
    count = int(valid.sum()) or 1
    means: dict[str, Any] = {name: float(getattr(result, name).sum()) / count for name in ("ce", "tv", "prob_true")}
    means["correct_per_slot"] = ((result.correct & valid).sum(0) / valid.sum(0).clamp(min=1)).tolist()
    return means
