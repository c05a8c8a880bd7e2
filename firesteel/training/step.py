"""One optimizer step's loss and gradients: what a run trains, and what its batches add up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from firesteel import recipe as recipes
from firesteel.batches.batch import Batch
from firesteel.drafters.rows import Drafter, Reranked
from firesteel.kernels.linear import half_products, wants_half
from firesteel.losses.fused import fused_loss
from firesteel.losses.types import LossResult, LossWeights, Teacher
from firesteel.training.data import BatchSource
from firesteel.training.parallel import ALONE, World
from firesteel.training.replica import Replica
from firesteel.training.tables import SharedTables


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
        on_step: called after each step with what a console shows, and with `alarm` where something went wrong that training survives.
        world: the processes that train together; each has a job of its own, with the same drafter, batches and folder.
        settings: what the run's results depend on; a state made under others is refused.
        replica: how the drafter is spread over several processes, once training has begun.
        watch: what is done about trouble.
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
    world: World = ALONE
    settings: dict[str, Any] = field(default_factory=dict)
    replica: Replica | None = None
    watch: recipes.Watch = field(default_factory=recipes.Watch)

    @property
    def device(self) -> torch.device:
        return self.tables.head.device

    @property
    def batches_per_step(self) -> int:
        """Batches of an optimizer step, over all ranks."""
        return self.train.accumulate * self.world.data_size


@dataclass
class Gradients:
    """What a step's batches came to on this rank, the gradients being in the drafter.

    Attributes:
        last: the result of the last batch.
        loss: the loss, or with several batches in a step this rank's part of its numerator.
        denominator: 1, or with several batches this rank's part of what the numerator is to be divided by.
        tokens: of these batches.
    """

    last: LossResult
    loss: float
    denominator: float
    tokens: int


def gradients(job: TrainJob, first: int, weights: LossWeights) -> Gradients:
    """Forward and backward passes over this rank's share of the batches `first` .. `first + job.batches_per_step - 1`.

    The loss of a step is the sum over all slots of its batches divided by all that `losses.types.denominator_of` would take of them, so it
    does not depend on how batches are dealt out to ranks and passes. The divisor may be known only after the forward passes (P-EAGLE drops
    slots), so with several batches numerators are summed, over ranks too, and `settle` divides. (A mean of the batches' own losses, which
    this is not, would weigh slots of small batches higher.)
    """
    alone = job.batches_per_step * job.world.context == 1
    total, denominator, tokens = 0.0, 0.0, 0
    for i, batch in enumerate(job.source.take(first, job.batches_per_step, job.world.data_rank, job.world.data_size)):
        last = backward(job, batch, weights, None if alone else 1.0, last=i + 1 == job.train.accumulate)
        tokens += len(batch.token_ids)
        total += float(last.loss.detach())
        # Both are zero where a slot is not valid.
        denominator += float((last.valid if weights.dpace else last.weights).sum())
    return Gradients(last, total, 1.0 if alone else denominator, tokens)


def settle(drafter: nn.Module, denominator: float, most: float) -> float:
    """Divide the gradients' numerators by `denominator`, clip them to the norm `most`; the norm before clipping, over all shards."""
    parameters = [p for p in drafter.parameters() if p.grad is not None]
    if denominator != 1.0:
        for p in parameters:
            assert p.grad is not None
            p.grad.div_(denominator)
    norm = nn.utils.clip_grad_norm_(parameters, most)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


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


def loss_of(job: TrainJob, batch: Batch, weights: LossWeights, denominator: float | None = None, *, last: bool = True) -> tuple[LossResult, Tensor | None]:
    """As `compute_loss`, by whatever the drafter is spread over; then a collective."""
    if job.replica is None:
        return compute_loss(job, batch, weights, denominator)
    return job.replica.loss(batch, weights, denominator, last=last)


def backward(job: TrainJob, batch: Batch, weights: LossWeights, denominator: float | None = None, *, last: bool = True) -> LossResult:
    """Loss of a batch, its gradients added to the drafter's; in the precision that the recipe asks for.

    Args:
        denominator: divisor of the sum over slots, see `fused_loss`.
        last: whether it is the step's last batch of this rank.
    """
    share = job.world.share
    batch = (batch if share is None else batch.divided(share)).to(job.device)
    sharded = job.replica is not None and job.replica.sharded
    with half_products(wants_half(job.train.precision, job.device), lean=sharded):
        result, _ = loss_of(job, batch, weights, denominator, last=last)
        result.loss.backward()
    return result
