"""The fused loss against the dense reference: numbers, metrics and all gradients."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from firesteel.errors import TrainingError
from firesteel.kernels.native import compiler
from firesteel.losses import rowwise
from firesteel.losses.types import Head, LossWeights

MIXES = {
    "ce": LossWeights(ce=1.0),
    "tv": LossWeights(tv=1.0),
    "kl": LossWeights(kl=1.0),
    "reverse_kl": LossWeights(reverse_kl=1.0),
    "jsd": LossWeights(jsd=1.0),
    "confidence": LossWeights(confidence=1.0),
    "dspark": LossWeights(ce=0.1, tv=0.9, confidence=1.0),
    "all": LossWeights(ce=0.1, tv=0.2, kl=0.3, reverse_kl=0.4, jsd=0.5, confidence=0.6),
}
FIELDS = ("weights", "valid", "ce", "tv", "accept", "prob_true", "correct", "agree", "kl", "reverse_kl", "jsd", "confidence")


def assert_same(case, mix, gradients, tolerance, **how):
    want, got = case.dense(mix), case.fused(mix, **how)
    torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=tolerance)
    for name in FIELDS:
        a, b = getattr(want, name), getattr(got, name)
        if a is None:
            assert b is None, name
        else:
            torch.testing.assert_close(b, a, rtol=0, atol=tolerance, msg=name)
    for a, b in zip(gradients(want.loss, case.inputs), gradients(got.loss, case.inputs), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dpace", [False, True], ids=["static", "dpace"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["nocap", "cap"])
@pytest.mark.parametrize("vocabulary", ["whole", "whole-exact", "reduced", "reduced-exact"])
@pytest.mark.parametrize("mix", MIXES)
def test_every_term_equals_the_reference(make_case, gradients, mix, vocabulary, softcap, dpace):
    case = make_case(reduced="reduced" in vocabulary, lognorm="exact" in vocabulary, softcap=softcap)
    assert_same(case, replace(MIXES[mix], dpace=dpace, dpace_smoothing=0.4), gradients, 1e-10)


@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_chunks_do_not_matter(make_case, gradients, chunk_rows):
    assert_same(make_case(), replace(MIXES["all"], dpace=True, dpace_smoothing=0.2), gradients, 1e-10, chunk_rows=chunk_rows)


def test_blocks_in_any_order(make_case, gradients):
    case = make_case(blocks=9)
    order = torch.randperm(9)
    for name in ("labels", "weights", "slot_target"):
        setattr(case, name, getattr(case, name)[order])
    assert_same(case, MIXES["all"], gradients, 1e-10, chunk_rows=4)


def test_given_denominator_and_a_second_factor(make_case, gradients):
    case = make_case()
    case.denominator = 17.0
    assert_same(case, MIXES["dspark"], gradients, 1e-10)
    once, thrice = gradients(case.fused(MIXES["dspark"]).loss, case.inputs), gradients(3 * case.fused(MIXES["dspark"]).loss, case.inputs)
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(b, 3 * a)


def test_whole_head_is_gathered_by_draft_rows(make_case):
    case = make_case(reduced=True, lognorm=True)
    want = case.dense(MIXES["all"]).loss
    draft, size = case.teacher.weight, case.teacher.weight.shape[0]
    case.draft_rows = torch.randperm(23)[:size]
    case.teacher.weight = torch.randn(23, 5, dtype=torch.float64)
    case.teacher.weight[case.draft_rows] = draft
    torch.testing.assert_close(case.fused(MIXES["all"]).loss, want)
    torch.testing.assert_close(case.dense(MIXES["all"]).loss, want)
    case.draft_rows = None
    with pytest.raises(TrainingError, match="23 rows"):
        case.fused(MIXES["all"])


def test_no_valid_slot_is_no_loss(make_case, gradients):
    case = make_case()
    case.weights = torch.zeros_like(case.weights)
    for mix in (MIXES["all"], replace(MIXES["all"], dpace=True)):
        result = case.fused(mix)
        assert result.loss.item() == 0
        assert all(bool((g == 0).all()) for g in gradients(result.loss, case.inputs))


def test_frozen_weights_get_no_gradient_and_validation_none_at_all(make_case):
    case = make_case()
    head, markov = case.pieces[0][1], case.pieces[1][1]
    head.requires_grad_(False)
    case.fused(MIXES["dspark"]).loss.backward()
    assert head.grad is None
    assert markov.grad is not None
    with torch.no_grad():
        quiet = case.fused(MIXES["dspark"])
    assert not quiet.loss.requires_grad
    torch.testing.assert_close(quiet.loss, case.fused(MIXES["dspark"]).loss.detach())


def test_confidence_alone_leaves_the_drafter_alone(make_case, gradients):
    """The target of the confidence is detached: 1 - TV gets no gradient through it."""
    case = make_case()
    *rest, confidence = gradients(case.fused(MIXES["confidence"]).loss, case.inputs)
    assert all(bool((g == 0).all()) for g in rest)
    assert bool((confidence[case.weights > 0] != 0).any())
    assert bool((confidence[case.weights == 0] == 0).all())


def test_second_backward_is_refused(make_case):
    loss = make_case().fused(MIXES["dspark"]).loss
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="twice"):
        loss.backward()


def test_wrong_shapes_are_refused(make_case):
    case = make_case()
    case.weights = case.weights[:, :-1]
    with pytest.raises(TrainingError, match="weights has shape"):
        case.fused(MIXES["dspark"])


@pytest.mark.parametrize("mix", ["dspark", "kl", "all"])
def test_half_precision_rows_and_weights(make_case, gradients, mix):
    """bfloat16 products, float32 softmax: no further from the exact numbers (of the same rounded tensors) than the reference is."""
    half = make_case(dtype=torch.bfloat16, vocab=301)
    exact = copy.deepcopy(half)
    exact.pieces = [tuple(t.detach().double().requires_grad_() for t in piece) for piece in half.pieces]
    exact.teacher.states, exact.teacher.weight = half.teacher.states.double(), half.teacher.weight.double()
    exact.confidence = half.confidence.detach().double().requires_grad_()
    exact.weights = half.weights.double()
    results = [case.dense(MIXES[mix]) if how == "dense" else case.fused(MIXES[mix]) for case, how in ((exact, "dense"), (half, "dense"), (half, "fused"))]
    torch.testing.assert_close(results[2].loss.double(), results[0].loss, rtol=1e-2, atol=1e-2)
    found = [gradients(r.loss, case.inputs) for r, case in zip(results, (exact, half, half), strict=True)]
    for want, dense, fused in zip(*found, strict=True):
        assert fused.dtype == torch.bfloat16
        assert (fused - want).norm() <= 1.5 * (dense - want).norm() + 0.01 * want.norm()


@pytest.mark.parametrize("mix", ["dspark", "kl", "all"])
def test_a_half_precision_head_under_float32_rows(make_case, gradients, mix):
    """The frozen head of a half-precision target beside a drafter's float32 tables: as with the head widened, up to the rounding of the rows."""
    wide = make_case(dtype=torch.float32, vocab=301)
    (rows, head), tables = wide.pieces
    wide.pieces = [(rows, head.detach().bfloat16().float()), tables]
    mixed = copy.copy(wide)
    mixed.pieces = [(rows, wide.pieces[0][1].bfloat16()), tables]
    inputs = [rows, *tables]
    one, other = mixed.fused(MIXES[mix]), wide.fused(MIXES[mix])
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-2, atol=1e-2)
    for got, want in zip(gradients(one.loss, inputs), gradients(other.loss, inputs), strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("dpace", [False, True], ids=["static", "dpace"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["nocap", "cap"])
@pytest.mark.parametrize("lognorm", [False, True], ids=["renormalised", "exact"])
@pytest.mark.parametrize("mix", ["ce", "tv", "kl", "reverse_kl", "dspark", "all"])
def test_compiled_equals_eager(make_case, gradients, mix, lognorm, softcap, dpace):
    case = make_case(reduced=True, lognorm=lognorm, softcap=softcap, dtype=torch.float32, vocab=2601)  # more than two inner blocks of the C code
    chosen = replace(MIXES[mix], dpace=dpace, dpace_smoothing=0.4)
    eager, compiled = case.fused(chosen), case.fused(chosen, compile=True)
    torch.testing.assert_close(compiled.loss, eager.loss, rtol=2e-6, atol=2e-6)
    assert torch.equal(compiled.agree, eager.agree)
    assert torch.equal(compiled.correct, eager.correct)
    for name in ("ce", "tv", "prob_true", "kl", "reverse_kl"):
        a, b = getattr(eager, name), getattr(compiled, name)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-5, atol=5e-6, msg=name)
    for a, b in zip(gradients(eager.loss, case.inputs), gradients(compiled.loss, case.inputs), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5 * float(a.abs().max()) + 1e-9)


def test_without_a_compiler_the_numbers_are_the_eager_ones(make_case, monkeypatch):
    monkeypatch.setattr("firesteel.losses.native.load", lambda source: None)
    case = make_case(dtype=torch.float32)
    assert torch.equal(case.fused(MIXES["dspark"], compile=True).loss, case.fused(MIXES["dspark"]).loss)


def test_traced_equals_eager(make_case, monkeypatch):
    """The path of accelerators as far as a CPU can follow: traced whole, for any number of rows, without Inductor's code generation."""
    case = make_case(dtype=torch.float32)
    eager = case.fused(MIXES["dspark"])
    ran = []

    def traced(function):
        ran.append(function.__name__)
        return torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager")

    monkeypatch.setattr(rowwise, "_inductor", traced)
    monkeypatch.setattr(rowwise.native, "usable", lambda like, jsd: False)
    build = rowwise.Kernels.__init__

    def as_accelerator(self, terms, like, *, compiled):
        build(self, terms, like, compiled=compiled)
        self._inductor = compiled

    monkeypatch.setattr(rowwise.Kernels, "__init__", as_accelerator)
    got = case.fused(MIXES["dspark"], compile=True)
    assert set(ran) == {"normalise_teacher", "normalise_draft", "finish"}
    torch.testing.assert_close(got.loss, eager.loss)
    torch.testing.assert_close(got.tv, eager.tv)


def test_head_scale_is_honoured_on_both_sides(make_case):
    """Scaling the product is scaling the states."""
    case = make_case()
    want = case.fused(MIXES["all"]).loss
    case.pieces = [(rows * case.head.scale, weight) for rows, weight in case.pieces]
    case.teacher.states = case.teacher.states * case.teacher.head.scale
    case.head = case.teacher.head = Head()
    torch.testing.assert_close(case.fused(MIXES["all"]).loss, want)
