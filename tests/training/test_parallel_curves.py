"""Several processes train what one would with the same batches in a step: the same curve, the same weights, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import launch, make_job, train_here
from safetensors.torch import load_file

from firesteel.errors import RecipeError
from firesteel.losses.types import denominator_of
from firesteel.training.loop import train
from firesteel.training.metrics import read_metrics
from firesteel.training.parallel import ALONE, World, open_world
from firesteel.training.schedule import loss_weights
from firesteel.training.step import compute_loss, gradients, settle

pytestmark = pytest.mark.processes

CASES = [
    ("dspark", "ddp", {"optimizer": "adamw"}),
    ("dspark", "fsdp", {"optimizer": "muon", "weight_decay": 0.01}),
    ("dflash2", "ddp", {"optimizer": "muon"}),
    ("dflash2", "fsdp", {"optimizer": "adamw"}),
    ("eagle3", "ddp", {"optimizer": "muon", "weight_decay": 0.01}),
    ("eagle3", "fsdp", {"optimizer": "muon"}),
    ("peagle", "ddp", {"optimizer": "adamw"}),
    ("peagle", "fsdp", {"optimizer": "adamw"}),
]


def curve(folder: Path) -> list[tuple[str, int, float]]:
    return [(r["kind"], r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl")]


def check_same(one: Path, several: Path, tolerance: float = 2e-4) -> None:
    ours, theirs = curve(several), curve(one)
    assert [c[:2] for c in ours] == [c[:2] for c in theirs]
    assert ours == [(kind, step, pytest.approx(loss, rel=1e-4)) for kind, step, loss in theirs]
    found, wanted = load_file(several / "best.safetensors"), load_file(one / "best.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("algorithm", "parallel", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else value["optimizer"])
def test_two_ranks_train_as_one_process_that_accumulates(algorithm: str, parallel: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """An epoch has an odd number of batches, so that steps reach over its end."""
    train_here(tmp_path / "one", algorithm, {**settings, "accumulate": 2})
    assert make_job(tmp_path, algorithm).source.per_epoch % 2
    launch(2, train_here, tmp_path / "two", algorithm, {**settings, "parallel": parallel})
    check_same(tmp_path / "one", tmp_path / "two")


def test_three_ranks_that_accumulate(tmp_path: Path) -> None:
    """Three ranks of two batches each; three held-out batches' worth of validation over them, and matrices that three do not divide."""
    settings = {"optimizer": "muon", "max_steps": 4}
    train_here(tmp_path / "one", "dspark", {**settings, "accumulate": 6})
    launch(3, train_here, tmp_path / "three", "dspark", {**settings, "accumulate": 2, "parallel": "fsdp"})
    check_same(tmp_path / "one", tmp_path / "three")


@pytest.mark.parametrize("mix", [{"ce": 1.0, "tv": 0.0}, {"ce": 0.5, "tv": 0.5, "position_weights": "dpace"}], ids=["static", "dpace"])
@pytest.mark.parametrize("algorithm", ["dspark", "peagle"])
def test_accumulated_batches_share_one_denominator(algorithm: str, mix: dict[str, Any], tmp_path: Path) -> None:
    """The loss of a step is that of its batches in one, not the mean of their losses."""
    job = make_job(tmp_path, algorithm, loss=mix, accumulate=3)
    weights = loss_weights(job.loss, 1.0)
    share = gradients(job, 0, weights)
    found = {name: p.grad.clone() for name, p in job.drafter.named_parameters() if p.grad is not None}
    settle(job.drafter, share.denominator, 1e9)

    parts, losses = 0.0, []
    job.drafter.zero_grad()
    for batch in job.source.take(0, 3):
        result, _ = compute_loss(job, batch, weights, 1.0)
        kept = result.weights.sum() if not weights.dpace else result.valid.sum()
        natural, _ = compute_loss(job, batch, weights)
        assert float(natural.denominator) == pytest.approx(float(kept))
        parts += float(natural.denominator)
        losses.append(float(result.loss.detach()))
        result.loss.backward()
    assert share.denominator == pytest.approx(parts)
    assert share.loss == pytest.approx(sum(losses))
    for name, p in job.drafter.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-6)


def test_one_batch_a_step_is_divided_by_its_own_denominator(tmp_path: Path) -> None:
    """As ever: with one process and accumulate=1 nothing is summed and nothing divided afterwards."""
    job = make_job(tmp_path)
    weights = loss_weights(job.loss, 1.0)
    share = gradients(job, 0, weights)
    found = {name: p.grad.clone() for name, p in job.drafter.named_parameters() if p.grad is not None}
    job.drafter.zero_grad()
    (batch,) = job.source.take(0, 1)
    result, _ = compute_loss(job, batch, weights)
    result.loss.backward()
    assert share.denominator == 1.0
    assert share.loss == float(result.loss.detach())
    assert all(p.grad is None or p.grad.equal(found[name]) for name, p in job.drafter.named_parameters())
    assert float(result.denominator) == float(denominator_of(None, result.weights, result.valid, False, torch.float32))


SHARED = [("dspark", "ddp", 2), ("dflash2", "fsdp", 2), ("latent", "ddp", 2), pytest.param("dspark", "fsdp", 4, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("algorithm", "parallel", "ranks"), SHARED)
def test_ranks_that_share_every_batch(algorithm: str, parallel: str, ranks: int, tmp_path: Path) -> None:
    """Blocks and context of a batch divided between two ranks; with four ranks there are two such pairs."""
    settings = {"max_steps": 4, "optimizer": "adamw", "lr": 1e-3}
    train_here(tmp_path / "one", algorithm, {**settings, "accumulate": ranks // 2})
    launch(ranks, train_here, tmp_path / "shared", algorithm, {**settings, "parallel": parallel, "context_ranks": 2})
    check_same(tmp_path / "one", tmp_path / "shared")


def _poisoned(folder: Path, parallel: str) -> None:
    """Rank 1's loss is not finite in step 2."""
    world = open_world()
    job = make_job(folder, "dspark", world, parallel=parallel)
    real, calls = job.source.take, []

    def take(*args: Any) -> Any:
        calls.append(1)
        for batch in real(*args):
            if world.rank == 1 and len(calls) == 2:
                batch.context[:] = float("nan")
            yield batch

    job.source.take = take  # type: ignore[method-assign]
    result = train(job)
    assert result.progress.skipped == 1
    assert result.progress.step == 6


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(parallel: str, tmp_path: Path) -> None:
    launch(2, _poisoned, tmp_path / "run", parallel)
    assert [r["skipped"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"] == [0]


def _refused(context: int) -> None:
    with pytest.raises(RecipeError, match=rf"train.context_ranks={context} does not divide the 2 processes"):
        open_world(context)


def test_a_world_that_does_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    _refused(3)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(RecipeError, match="does not divide the 1 process of this run"):
        open_world(2)


def test_alone_nothing_is_said() -> None:
    assert ALONE.sums([1.5, 2.0]) == [1.5, 2.0]
    assert ALONE.tell("a") == "a"
    assert ALONE.collect([1, 2]) == [1, 2]
    assert (ALONE.first, ALONE.data_size, ALONE.share) == (True, 1, None)
    assert [World(r, 4, 2).data_rank for r in range(4)] == [0, 0, 1, 1]
