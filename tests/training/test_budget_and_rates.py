"""When training ends early, how fast it learns, how large a step may be, and what TensorBoard shows of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import STEPS, make_job
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from firesteel.training import loop
from firesteel.training.loop import train
from firesteel.training.metrics import METRICS, MetricsLog, read_metrics
from firesteel.training.optimizer import Optimizers, lr_scale
from firesteel.training.step import settle
from firesteel.training.validation import Validation

LENGTHS = [1.5, 1.8, 1.75, 1.78, 1.9, 1.9]


def judged(monkeypatch: pytest.MonkeyPatch, weights: list[dict[str, torch.Tensor]]) -> None:
    """Validations find `LENGTHS`, one after the other; the weights that they saw are noted."""
    left = iter(LENGTHS)

    def found(job: Any, **_: Any) -> Validation:
        weights.append({name: p.detach().clone() for name, p in job.drafter.named_parameters()})
        return Validation(next(left), 1.0, 1.0, [0.5], 5, 10)

    monkeypatch.setattr(loop, "run_validation", found)


def test_training_stops_when_validation_no_longer_improves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With patience 2 the fourth validation, the second without a better one, ends it; the weights kept are the second's."""
    seen: list[dict[str, torch.Tensor]] = []
    judged(monkeypatch, seen)
    result = train(make_job(tmp_path, max_steps=100, validate_every=2, patience=2))
    assert result.stopped_by == "patience"
    assert (result.progress.step, result.progress.best_step, result.progress.best) == (8, 4, 1.8)
    kept = load_file(tmp_path / "best.safetensors")
    assert all(kept[name].equal(tensor) for name, tensor in seen[1].items())
    assert not all(kept[name].equal(tensor) for name, tensor in seen[3].items())
    assert [r["step"] for r in read_metrics(tmp_path / METRICS) if r["kind"] == "validation"] == [2, 4, 6, 8]


def test_without_patience_the_budget_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(monkeypatch, [])
    result = train(make_job(tmp_path, max_steps=10, validate_every=2))
    assert (result.stopped_by, result.progress.step, result.progress.best_step) == ("budget", 10, 10)


@pytest.mark.parametrize(("warmup", "final"), [(0.1, 0.05), (0.0, 0.0), (0.5, 1.0)])
def test_the_schedule_is_a_warm_up_and_a_cosine(warmup: float, final: float) -> None:
    for i in range(101):
        t = i / 100
        rising = t / warmup or 1e-3 if t < warmup else 1.0  # not 0: the first step should do something
        falling = final + (1 - final) * (1 + math.cos(math.pi * (t - warmup) / (1 - warmup))) / 2
        wanted = rising if t < warmup else falling
        assert lr_scale(t, warmup, final) == pytest.approx(wanted, abs=1e-12)
    assert lr_scale(warmup, warmup, final) == pytest.approx(1)
    assert lr_scale(1, warmup, final) == pytest.approx(final)


def test_every_step_is_taken_at_the_schedules_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[dict[str, float]] = []
    real = Optimizers.step

    def noting(self: Optimizers) -> None:
        rates.append({type(o).__name__: group["lr"] for o, _ in self.peaks for group in o.param_groups})
        real(self)

    monkeypatch.setattr(Optimizers, "step", noting)
    train(make_job(tmp_path, max_steps=20, validate_every=20, optimizer="muon", warmup=0.2, final_lr=0.1))
    assert len(rates) == 20
    for step, found in enumerate(rates):
        scale = max(step / 4, 1e-3) if step < 4 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 16)) / 2
        assert found == {"Muon": pytest.approx(STEPS["muon_lr"] * scale), "AdamW": pytest.approx(STEPS["lr"] * scale)}


def module_with_gradients() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    module(torch.randn(11, 5)).square().sum().backward()
    return module, {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("denominator", [1.0, 8.0])
def test_a_gradient_above_the_norm_is_scaled_to_it_and_a_smaller_one_is_left_alone(denominator: float) -> None:
    module, before = module_with_gradients()
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in before.values())) / denominator
    assert settle(module, denominator, norm / 4) == pytest.approx(norm, rel=1e-6)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, before[name] / denominator / 4, rtol=1e-5, atol=0)

    module, before = module_with_gradients()
    assert settle(module, denominator, norm * 1.01) == pytest.approx(norm, rel=1e-6)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.equal(before[name] / denominator)


def test_the_optimizer_gets_the_clipped_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, max_steps=10, validate_every=10, clip=0.05)
    norms: list[float] = []
    real = Optimizers.step

    def noting(self: Optimizers) -> None:
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in job.drafter.parameters() if p.grad is not None)))
        real(self)

    monkeypatch.setattr(Optimizers, "step", noting)
    train(job)
    logged = [r["grad_norm"] for r in read_metrics(tmp_path / METRICS) if r["kind"] == "train"]
    assert min(logged) > 0.05  # of step 1 and step 10: before clipping
    assert norms == [pytest.approx(0.05, rel=1e-4)] * 10


def test_tensorboard_shows_the_metrics(tmp_path: Path) -> None:
    """Every number of metrics.jsonl is a scalar of the same name at the same step."""
    train(make_job(tmp_path, max_steps=20, validate_every=10))
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    wanted: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(tmp_path / METRICS):
        for name, value in record.items():
            if name not in ("kind", "step") and isinstance(value, int | float):
                wanted.setdefault(f"{record['kind']}/{name}", []).append((record["step"], value))
    assert {"train/loss", "train/grad_norm", "validation/acceptance_length", "validation/expected_length"} <= wanted.keys()
    assert set(board.Tags()["scalars"]) == set(wanted)
    for tag, points in wanted.items():
        assert [(e.step, e.value) for e in board.Scalars(tag)] == [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
    assert [step for step, _ in wanted["train/loss"]] == [1, 10, 20]


def test_a_resumed_curve_repeats_no_step_in_tensorboard(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    for step in (10, 20, 30):
        log.write("train", step, {"loss": float(step), "per_slot": [1.0, 2.0]})
    log.close()
    log = MetricsLog(tmp_path, 20)
    log.write("train", 30, {"loss": 31.0})
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(10, 10.0), (20, 20.0), (30, 31.0)]
    assert [r["loss"] for r in read_metrics(tmp_path / METRICS)] == [10.0, 20.0, 31.0]
