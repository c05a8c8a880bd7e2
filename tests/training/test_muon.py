"""Muon against PyTorch's own and against the definition: an orthogonalised update."""

from __future__ import annotations

import copy

import pytest
import torch

from firesteel.training import muon
from firesteel.training.muon import Muon, orthogonalise

_JORDANS = ((3.4445, -4.7750, 2.0315),) * 5  # PyTorch's iterations


def test_quintics_are_the_nearest_to_one_each_on_what_the_last_one_left() -> None:
    # Chebyshev: of polynomials with three free coefficients the one whose error takes its largest size four times, with signs in turn, is nearest.
    low, high = 0.005, 1.0
    for a, b, c in muon.QUINTICS:
        x = torch.linspace(low, 1.01 * high, 200_001, dtype=torch.float64)
        error = a * x + b * x**3 + c * x**5 - 1
        worst = float(error.abs().max())
        signs = error[error.abs() > worst - 1e-4].sign()
        assert 1 + int((signs[1:] != signs[:-1]).sum()) == 4
        low, high = 1 - worst, 1 + worst
    assert low == pytest.approx(0.495, abs=0.001)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_update_keeps_the_singular_vectors_and_levels_the_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.logspace(0, -2, min(shape))
    values /= values.norm()
    found = orthogonalise(u * values @ vh, half=False)
    inner = u.T @ found @ vh.T
    assert float((inner - inner.diag().diag()).abs().max()) < 1e-4
    assert float(values.min()) > 0.005
    assert 0.49 < float(inner.diag().min()) <= float(inner.diag().max()) < 1.51


def test_wide_matrices_take_the_iterations_of_others() -> None:
    torch.manual_seed(4)
    wide = torch.randn(24, 40)
    wide /= wide.norm()
    assert torch.allclose(muon._by_gram(wide.clone()), muon._by_rows(wide.clone()), atol=1e-5)


def test_bfloat16_iterations_are_close_to_float32s() -> None:
    torch.manual_seed(1)
    matrix = torch.randn(64, 96)
    exact, rough = orthogonalise(matrix, half=False), orthogonalise(matrix, half=True)
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    assert float((exact - rough).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("shape", [(32, 32), (48, 16), (16, 48)])
def test_steps_are_those_of_pytorchs_muon(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "QUINTICS", _JORDANS)
    torch.manual_seed(2)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = Muon([ours], 0.05, weight_decay=0.1, precision="float32")
    other = torch.optim.Muon([theirs], lr=0.05, weight_decay=0.1, momentum=0.95)
    for g in gradients:
        ours.grad, theirs.grad = g.clone(), g.clone()
        mine.step()
        other.step()
    moved = (theirs - start).detach()
    assert float((ours - theirs).detach().norm() / moved.norm()) < 0.02  # PyTorch's iterations are bfloat16's


def test_state_survives_a_round_trip() -> None:
    torch.manual_seed(3)
    gradients = [torch.randn(8, 12) for _ in range(4)]
    parameter = torch.nn.Parameter(torch.randn(8, 12))
    optimizer = Muon([parameter], 0.1)
    for i, g in enumerate(gradients):
        if i == 2:
            twin = torch.nn.Parameter(parameter.detach().clone())
            other = Muon([twin], 0.7)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        parameter.grad = g
        optimizer.step()
        if i >= 2:
            twin.grad = g.clone()
            other.step()
    assert torch.equal(parameter, twin)
