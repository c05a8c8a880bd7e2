"""What must hold whatever the implementation: closed formulas, bounds, memory, determinism."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from firesteel.losses.dense import dense_loss
from firesteel.losses.fused import fused_loss
from firesteel.losses.types import Head, LossWeights, Teacher

EVERYTHING = LossWeights(ce=0.1, tv=0.2, kl=0.3, reverse_kl=0.4, jsd=0.5, confidence=0.6)


def as_logits(draft, target, losses, mix, label=0, lognorm=None):
    """One slot whose logits are given: identity heads."""
    size = draft.shape[0]
    eye = torch.eye(size, dtype=draft.dtype)
    rows = draft[None].clone().requires_grad_()
    teacher = Teacher(target[None], eye, Head(), None if lognorm is None else torch.tensor([lognorm], dtype=draft.dtype))
    one = torch.ones(1, 1, dtype=draft.dtype)
    result = losses([(rows, eye)], Head(), teacher, torch.tensor([[label]]), one, torch.zeros(1, 1, dtype=torch.int64), mix)
    return result, torch.autograd.grad(result.loss, rows)[0][0]


@pytest.mark.parametrize("losses", [dense_loss, fused_loss])
def test_gradient_of_total_variation_is_the_closed_formula(losses):
    torch.manual_seed(1)
    draft, target = torch.randn(2, 40, dtype=torch.float64)
    result, gradient = as_logits(draft, target, losses, LossWeights(tv=1.0))
    pd, pt = draft.softmax(0), target.softmax(0)
    s = torch.sign(pd - pt)
    torch.testing.assert_close(gradient, pd * (s - (pd * s).sum()) / 2, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.loss, 1 - torch.minimum(pd, pt).sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("losses", [dense_loss, fused_loss])
@pytest.mark.parametrize(("term", "value"), [("ce", 1.0), ("kl", None), ("reverse_kl", None), ("jsd", None)])
def test_divergences_are_those_of_the_textbook(losses, term, value):
    torch.manual_seed(2)
    draft, target = torch.randn(2, 40, dtype=torch.float64)
    result, _ = as_logits(draft, target, losses, LossWeights(**{term: 1.0}), label=7)
    lpd, lpt = draft.log_softmax(0), target.log_softmax(0)
    mean = torch.logaddexp(lpd, lpt) - math.log(2)
    want = {
        "ce": F.cross_entropy(draft, torch.tensor(7)),
        "kl": F.kl_div(lpd, lpt, reduction="sum", log_target=True),
        "reverse_kl": F.kl_div(lpt, lpd, reduction="sum", log_target=True),
        "jsd": (F.kl_div(mean, lpt, reduction="sum", log_target=True) + F.kl_div(mean, lpd, reduction="sum", log_target=True)) / 2,
    }[term]
    torch.testing.assert_close(result.loss, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("losses", [dense_loss, fused_loss])
def test_missing_mass_counts_as_over_the_whole_vocabulary(losses):
    """With exact probabilities TV, KL(d) and JSD of a reduced vocabulary are those of the whole one, where the draft has probability 0."""
    torch.manual_seed(3)
    target = torch.randn(50, dtype=torch.float64)
    draft = torch.randn(20, dtype=torch.float64)
    result, _ = as_logits(draft, target[:20], losses, EVERYTHING, lognorm=float(target.logsumexp(0)))
    pd, pt = torch.cat([draft.softmax(0), torch.zeros(30, dtype=torch.float64)]), target.softmax(0)
    mean = (pd + pt) / 2
    torch.testing.assert_close(result.tv[0, 0], (pd - pt).abs().sum() / 2)
    torch.testing.assert_close(result.accept[0, 0], torch.minimum(pd, pt).sum())
    torch.testing.assert_close(result.reverse_kl[0, 0], (pd[:20] * (pd[:20] / pt[:20]).log()).sum())
    torch.testing.assert_close(result.jsd[0, 0], (torch.xlogy(pt, pt / mean).sum() + torch.xlogy(pd, pd / mean).sum()) / 2)
    assert result.kl[0, 0] > 0


@pytest.mark.parametrize("losses", [dense_loss, fused_loss])
def test_label_outside_the_draft_vocabulary(losses):
    torch.manual_seed(4)
    draft, target = torch.randn(2, 12, dtype=torch.float64)
    result, gradient = as_logits(draft, target, losses, LossWeights(ce=1.0), label=-1)
    assert result.ce.item() == 0
    assert result.prob_true.item() == 0
    assert not result.correct.item()
    assert bool((gradient == 0).all())
    assert result.tv.item() > 0


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_perfect_draft(softcap):
    """Draft equals teacher: every divergence and every gradient of one is 0, acceptance 1, first choices agree."""
    torch.manual_seed(5)
    states, weight = torch.randn(6, 8, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
    rows, head = states.clone().requires_grad_(), Head(0.5, softcap)
    ones, target = torch.ones(2, 3, dtype=torch.float64), torch.arange(6).view(2, 3)
    mix = LossWeights(tv=1.0, kl=1.0, reverse_kl=1.0, jsd=1.0)
    result = fused_loss([(rows, weight)], head, Teacher(states, weight, head), torch.zeros(2, 3, dtype=torch.int64), ones, target, mix, chunk_rows=3)
    assert abs(result.loss.item()) < 1e-12
    assert bool(result.agree.all())
    torch.testing.assert_close(result.accept, ones)
    smooth = LossWeights(kl=1.0, reverse_kl=1.0, jsd=1.0)  # TV has a kink here
    result = fused_loss([(rows, weight)], head, Teacher(states, weight, head), torch.zeros(2, 3, dtype=torch.int64), ones, target, smooth)
    assert torch.autograd.grad(result.loss, rows)[0].abs().max() < 1e-12


class Largest(TorchDispatchMode):
    """Records the largest tensor any operator returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_no_tensor_of_rows_times_vocabulary(make_case, compile):
    case = make_case(dtype=torch.float32, blocks=64, slots=8, vocab=3000)
    rows, chunk = 64 * 8, 32
    with Largest() as seen:
        case.fused(LossWeights(ce=0.1, tv=0.9, confidence=1.0), chunk_rows=chunk, compile=compile).loss.backward()
    assert seen.numel <= (chunk + 2 * 8) * 3000  # the teacher's buffer, with room for two more blocks
    with Largest() as dense:
        case.dense(LossWeights(ce=0.1, tv=0.9)).loss.backward()
    assert dense.numel >= rows * 3000  # the guard would have seen it


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_same_inputs_same_bits(make_case, gradients, compile):
    case = make_case(dtype=torch.float32, blocks=40, vocab=2000, hidden=64)
    mix = LossWeights(ce=0.1, tv=0.9, confidence=1.0, dpace=True, dpace_smoothing=0.5)
    runs = [case.fused(mix, compile=compile) for _ in range(3)]
    bits = [[r.loss.detach(), r.tv, r.weights, *gradients(r.loss, case.inputs)] for r in runs]
    for other in bits[1:]:
        assert all(torch.equal(a, b) for a, b in zip(bits[0], other, strict=True))


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_not_finite_stays_visible(make_case, compile):
    """A NaN in the rows must reach the loss, where the training guard looks for it."""
    case = make_case(dtype=torch.float32)
    row = int((case.weights.view(-1) > 0).nonzero()[0])
    with torch.no_grad():
        case.pieces[0][0][row, 0] = math.nan
    assert math.isnan(case.fused(LossWeights(ce=0.1, tv=0.9), compile=compile).loss.item())


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_extreme_logits(compile):
    """Logits of several hundred, as untrained or quantised models give: finite, and right at both ends."""
    draft = torch.full((1, 600), -400.0)
    draft[0, 3] = 400.0
    target = torch.full((1, 600), -300.0)
    target[0, 5] = 300.0
    eye = torch.eye(600)
    rows = draft.clone().requires_grad_()
    mix = LossWeights(ce=1.0, tv=1.0, kl=1.0)
    result = fused_loss(
        [(rows, eye)], Head(), Teacher(target, eye), torch.tensor([[3]]), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), mix, compile=compile
    )
    assert result.tv.item() == pytest.approx(1.0, abs=1e-5)
    assert result.ce.item() == pytest.approx(0.0, abs=1e-5)
    assert result.kl.item() == pytest.approx(800.0, rel=1e-4)
    assert bool(torch.isfinite(torch.autograd.grad(result.loss, rows)[0]).all())
