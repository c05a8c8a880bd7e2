"""Muon against PyTorch's own and against the definition: an orthogonalised update."""

from __future__ import annotations

import copy

import pytest
import torch

from firesteel.training.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_update_keeps_the_singular_vectors_and_levels_the_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalise(matrix, half=False)
    inner = u.T @ found @ vh.T
    assert float((inner - inner.diag().diag()).abs().max()) < 1e-4
    assert 0.6 < float(inner.diag().min()) <= float(inner.diag().max()) < 1.3


def test_bfloat16_iterations_are_close_to_float32s() -> None:
    torch.manual_seed(1)
    matrix = torch.randn(64, 96)
    exact, rough = orthogonalise(matrix, half=False), orthogonalise(matrix, half=True)
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    assert float((exact - rough).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("shape", [(32, 32), (48, 16), (16, 48)])
def test_steps_are_those_of_pytorchs_muon(shape: tuple[int, int]) -> None:
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
