"""The training loop: next batch, loss, backward, clip, step, log, validate, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.batches.batch import Batch
from firesteel.drafters.rows import Drafter, Reranked
from firesteel.kernels.linear import half_products, wants_half
from firesteel.kernels.memory import map_large_blocks
from firesteel.losses.fused import fused_loss
from firesteel.losses.types import LossResult, LossWeights, Teacher
from firesteel.training.checkpoint import Progress, load_state, save_best, save_state
from firesteel.training.data import BatchSource
from firesteel.training.guards import FiniteGuard
from firesteel.training.metrics import MetricsLog
from firesteel.training.optimizer import Optimizers, lr_scale
from firesteel.training.schedule import loss_weights, progress_of
from firesteel.training.tables import SharedTables
from firesteel.training.validation import Validation, validate

_LOG_EVERY = 10
_LARGE_VOCAB = 16384


@dataclass
class TrainJob:
    """What a training run needs.

    Attributes:
        drafter: a `torch.nn.Module` that is also a `drafters.rows.Drafter`.
        tables: the target's frozen embedding and head, cut to the draft vocabulary.
        source: the training batches; a batch depends on the seed and its number only.
        held_out: batches for validation (every eligible anchor).
        folder: where state, best weights and metrics are kept; a state found there is resumed.
        eos_ids: tokens that end a text.
        on_step: called after each step with what a console shows.
    """

    drafter: Any
    tables: SharedTables
    source: BatchSource
    held_out: list[Batch]
    train: recipes.Train
    loss: recipes.Loss
    folder: Path
    eos_ids: tuple[int, ...]
    on_step: Callable[[dict[str, Any]], None]


@dataclass
class TrainResult:
    """What a finished run tells."""

    progress: Progress
    stopped_by: str
    final: Validation


def train(job: TrainJob) -> TrainResult:
    """Train until the budget is used or validation stops improving. Resumes from `job.folder`.

    The best weights, by validation acceptance length, are left in `job.folder` and in the drafter.

    Raises:
        TrainingError: too many non-finite steps.
    """
    prepare_memory(job)
    optimizers = Optimizers(job.drafter, job.train)
    progress = _resume(job, optimizers)
    guard = FiniteGuard(job.train.nonfinite_budget, progress.skipped)
    log = MetricsLog(job.folder, progress.step)
    started = time.monotonic() - progress.seconds
    saved_at = time.monotonic()
    stopped_by = "budget"
    try:
        while True:
            epoch = job.source.epoch_of(progress.batch)
            done = progress_of(job.train, step=progress.step, epoch=epoch, seconds=progress.seconds)
            due = progress.step % job.train.validate_every == 0 or done >= 1.0
            if due and progress.step > 0 and progress.last_validation != progress.step:
                _validate(job, progress, log)
                save_state(job.folder, job.drafter, optimizers.state_dict(), progress)
                if job.train.patience is not None and progress.since_best >= job.train.patience:
                    stopped_by = "patience"
                    break
            if done >= 1.0:
                break
            weights = loss_weights(job.loss, done)
            optimizers.set_scale(lr_scale(done, job.train.warmup, job.train.final_lr))
            optimizers.zero_grad()
            results = [backward(job, batch, weights) for batch in job.source.take(progress.batch, job.train.accumulate)]
            norm = float(nn.utils.clip_grad_norm_(job.drafter.parameters(), job.train.clip))
            total = sum(float(r.loss.detach()) for r in results)
            if guard.admits(total, norm, progress.step + 1):
                optimizers.step()
            progress.step += 1
            progress.batch += job.train.accumulate
            progress.skipped = guard.skipped
            progress.seconds = time.monotonic() - started
            _report(job, progress, log, results, total, norm, done)
            if time.monotonic() - saved_at > 60 * job.train.checkpoint_minutes:
                save_state(job.folder, job.drafter, optimizers.state_dict(), progress)
                saved_at = time.monotonic()
    except KeyboardInterrupt:
        save_state(job.folder, job.drafter, optimizers.state_dict(), progress)
        raise
    finally:
        log.close()
    return TrainResult(progress, stopped_by, run_validation(job))


def prepare_memory(job: TrainJob) -> None:
    """With a large vocabulary on a CPU, keep the allocator from piling up what steps free."""
    if job.tables.head.device.type == "cpu" and job.tables.head.shape[0] >= _LARGE_VOCAB:
        map_large_blocks()


def run_validation(job: TrainJob, *, keep_blocks: bool = False) -> Validation:
    """Evaluate the drafter as it is on the held-out batches."""
    job.drafter.eval()
    found = validate(_evaluated(job), sample_from_anchor=job.drafter.config.sample_from_anchor, eos_ids=job.eos_ids, keep_blocks=keep_blocks)
    job.drafter.train()
    return found


def compute_loss(job: TrainJob, batch: Batch, weights: LossWeights, denominator: float | None = None) -> tuple[LossResult, Tensor | None]:
    """One forward pass: the loss of a batch and the confidence logits."""
    tables, drafter = job.tables, cast(Drafter, job.drafter)
    rows = drafter.training_rows(batch, tables.embed, tables.head)
    teacher = Teacher(tables.teacher_states(batch.target_last), tables.teacher_weight, tables.teacher_head, batch.target_lognorm)
    result = fused_loss(
        rows.pieces,
        tables.draft_head,
        teacher,
        batch.draft_labels,
        batch.weights if rows.kept is None else batch.weights * rows.kept,
        batch.slot_target,
        weights,
        rows.confidence_logits,
        denominator=denominator,
        compile=job.train.compile,
        candidates=rows.candidates,
    )
    if rows.rerank is not None:
        assert result.candidates is not None, "asked for above"
        assert result.candidate_teacher is not None, "comes with the candidates"
        result = _with_second_choice(result, rows.rerank(result.candidates, result.candidate_teacher))
    return result, rows.confidence_logits


def _with_second_choice(result: LossResult, second: Reranked) -> LossResult:
    """The loss of a drafter that chooses again among the likeliest tokens: both choices are trained, the second one is what is judged."""
    extra = (result.weights * torch.where(result.valid, second.loss, 0)).sum() / result.denominator
    return replace(result, loss=result.loss + extra, correct=second.correct & result.valid, accept=second.accept * result.valid)


def backward(job: TrainJob, batch: Batch, weights: LossWeights) -> LossResult:
    """Loss of a batch, its gradients added to the drafter's; in the precision that the recipe asks for."""
    with half_products(wants_half(job.train.precision, batch.anchors.device)):
        result, _ = compute_loss(job, batch, weights)
        (result.loss / job.train.accumulate).backward()
    return result


@torch.no_grad()
def _evaluated(job: TrainJob) -> Iterable[tuple[Batch, LossResult, Tensor | None]]:
    weights = loss_weights(job.loss, 1.0)
    for batch in job.held_out:
        result, confidence = compute_loss(job, batch, weights)
        yield batch, result, confidence


def _resume(job: TrainJob, optimizers: Optimizers) -> Progress:
    state = load_state(job.folder)
    if state is None:
        return Progress()
    job.drafter.load_state_dict(state["module"])
    optimizers.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def _validate(job: TrainJob, progress: Progress, log: MetricsLog) -> None:
    found = run_validation(job)
    progress.last_validation = progress.step
    if found.acceptance_length > progress.best:
        progress.best, progress.best_step, progress.since_best = found.acceptance_length, progress.step, 0
        save_best(job.folder, job.drafter)
    else:
        progress.since_best += 1
    values = {
        "acceptance_length": found.acceptance_length,
        "expected_length": found.expected_length,
        "loss": found.loss,
        "conditional": found.conditional,
        "seconds": progress.seconds,
    }
    log.write("validation", progress.step, values)
    job.on_step({"validation": found.acceptance_length, "best": progress.best, "step": progress.step})


def _report(job: TrainJob, progress: Progress, log: MetricsLog, results: list[LossResult], loss: float, norm: float, done: float) -> None:
    last = results[-1]
    values: dict[str, Any] = {"loss": loss / len(results), "grad_norm": norm, "seconds": progress.seconds, "skipped": progress.skipped}
    if progress.step % _LOG_EVERY == 0 or progress.step == 1:
        log.write("train", progress.step, values | _means(last) | job.source.report())
    job.on_step({"step": progress.step, "done": done, "loss": values["loss"], "best": progress.best, "seconds": progress.seconds})


def _means(result: LossResult) -> dict[str, Any]:
    """Means over valid slots, and per slot the share of true tokens that the draft would choose."""
    valid = result.valid
    count = int(valid.sum()) or 1
    means: dict[str, Any] = {name: float(getattr(result, name).sum()) / count for name in ("ce", "tv", "prob_true")}
    means["correct_per_slot"] = ((result.correct & valid).sum(0) / valid.sum(0).clamp(min=1)).tolist()
    return means
