"""Static weights and D-PACE against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from firesteel.losses.weights import dpace_weights, exponential_weights, uniform_weights


def test_exponential_counts_drafted_tokens_not_slots():
    anchored, plain = exponential_weights(4, True, 2.0), exponential_weights(4, False, 2.0)
    assert anchored.tolist() == pytest.approx([math.exp(-k / 2) for k in range(4)])
    assert plain.tolist() == pytest.approx([0.0] + [math.exp(-k / 2) for k in range(3)])


def test_uniform():
    assert uniform_weights(3, True).tolist() == [1, 1, 1]
    assert uniform_weights(3, False).tolist() == [0, 1, 1]


def by_hand(q, valid, a):
    """The definition, slot by slot, on one block."""
    chain = []
    for k, ok in enumerate(valid):
        if ok:
            chain.append(k)
        elif chain:
            break
    out = [0.0] * len(q)
    for j in chain:
        out[j] = sum(math.prod((1 - a) * q[i] + a for i in chain if i <= m) for m in chain if m >= j)
    return out


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
def test_dpace_is_its_definition(smoothing):
    torch.manual_seed(0)
    q, valid = torch.rand(60, 5, dtype=torch.float64), torch.rand(60, 5) > 0.3
    want = torch.tensor([by_hand(q[n].tolist(), valid[n].tolist(), smoothing) for n in range(60)], dtype=torch.float64)
    torch.testing.assert_close(dpace_weights(q, valid, smoothing), want)


def test_dpace_chain_ends_at_the_first_gap_and_skips_a_leading_slot():
    q = torch.full((2, 5), 0.5)
    valid = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])
    got = dpace_weights(q, valid, 0.0)
    assert got[0].tolist() == pytest.approx([0.75, 0.25, 0, 0, 0])
    assert got[1].tolist() == pytest.approx([0, 0.875, 0.375, 0.125, 0])


def test_dpace_first_weight_is_the_expected_number_of_accepted_tokens():
    """w_1 = sum_m prod_{i<=m} q_i; by enumeration of where the first rejection falls."""
    q = [0.9, 0.4, 0.7]
    expected = sum(m * math.prod(q[:m]) * (1 - q[m] if m < 3 else 1) for m in range(4))
    got = dpace_weights(torch.tensor([q], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool), 0.0)
    assert got[0, 0].item() == pytest.approx(expected)


def test_dpace_does_not_differentiate():
    q = torch.rand(2, 3, requires_grad=True)
    assert not dpace_weights(q, torch.ones(2, 3, dtype=torch.bool), 0.5).requires_grad
