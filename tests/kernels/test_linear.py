"""Fast products against torch's own in float64, their gradients, and the plain paths."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional as F

from firesteel.errors import RecipeError
from firesteel.kernels.linear import half_products, has_fast_half, linear, matmul_nn, matmul_nt, matmul_tn, wants_half

SHAPES = [(1, 64, 5000), (37, 129, 301), (128, 96, 700), (5, 3, 2), (0, 4, 3)]


@pytest.fixture(params=["torch", "onednn", "auto"])
def backend(request, monkeypatch):
    monkeypatch.setenv("FIRESTEEL_MATMUL", request.param)
    return request.param


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_products(backend, shape):
    n, k, m = shape
    torch.manual_seed(0)
    a, b, c = torch.randn(n, k), torch.randn(m, k), torch.randn(n, m)
    close(matmul_nt(a, b), a.double() @ b.double().T)
    close(matmul_nt(a, b, add=c.clone()), a.double() @ b.double().T + c.double())
    close(matmul_nn(c, b), c.double() @ b.double())
    close(matmul_tn(c, a), c.double().T @ a.double())
    total = torch.ones(m, k)
    assert matmul_tn(c, a, accumulate=total) is total
    close(total, 1 + c.double().T @ a.double())


def test_transposed_and_strided_operands(backend):
    torch.manual_seed(1)
    a, b = torch.randn(96, 64).T, torch.randn(96, 300).T
    close(matmul_nt(a, b), a.double() @ b.double().T)
    close(matmul_nn(a, b.T), a.double() @ b.double().T)
    wide = torch.randn(64, 192)[:, ::2]
    close(matmul_nt(wide, b), wide.double() @ b.double().T)


@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 1, 3), ()])
def test_linear_has_the_gradients_of_torch(backend, lead):
    torch.manual_seed(2)
    x, w = torch.randn(*lead, 256, requires_grad=True), torch.randn(900, 256, requires_grad=True)
    out = linear(x, w)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, w), upstream)
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    want_out = F.linear(x64, w64)
    want = torch.autograd.grad(want_out, (x64, w64), upstream.double())
    close(out, want_out)
    for g, wanted in zip(got, want, strict=True):
        close(g, wanted)


def test_linear_gradient_where_only_one_side_needs_it():
    x, w = torch.randn(40, 128, requires_grad=True), torch.randn(90, 128)
    linear(x, w).sum().backward()
    assert x.grad is not None
    x, w = torch.randn(40, 128), torch.randn(90, 128, requires_grad=True)
    linear(x, w).sum().backward()
    close(w.grad, torch.ones(90, 40, dtype=torch.float64) @ x.double())
    with torch.no_grad():
        assert not linear(x, w).requires_grad


def test_gradcheck_in_float64():
    x, w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(linear, (x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_take_the_plain_path(dtype):
    x, w = torch.randn(40, 128, dtype=dtype), torch.randn(90, 128, dtype=dtype)
    assert torch.equal(linear(x, w), F.linear(x, w))
    assert torch.equal(matmul_nt(x, w), x @ w.T)


def test_meta_autocast_and_empty():
    assert linear(torch.empty(700, 128, device="meta"), torch.empty(900, 128, device="meta")).shape == (700, 900)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.randn(70, 128), torch.randn(90, 128)).dtype == torch.bfloat16
    assert linear(torch.randn(0, 128), torch.randn(90, 128)).shape == (0, 90)


def test_same_inputs_same_bits(backend):
    a, b = torch.randn(100, 300), torch.randn(2000, 300)
    first = matmul_nt(a, b), matmul_nn(a.T.contiguous(), a), matmul_tn(a, a)
    matmul_nt(a[:50], b)
    again = matmul_nt(a, b), matmul_nn(a.T.contiguous(), a), matmul_tn(a, a)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_unknown_backend_is_named(monkeypatch):
    monkeypatch.setenv("FIRESTEEL_MATMUL", "cublas")
    with pytest.raises(RecipeError, match="FIRESTEEL_MATMUL=cublas"):
        matmul_nt(torch.randn(64, 128), torch.randn(900, 128))


def test_half_products_are_close_and_their_gradients_too():
    torch.manual_seed(5)
    x, w, g = torch.randn(70, 128, requires_grad=True), torch.randn(96, 128, requires_grad=True), torch.randn(70, 96)
    with half_products(True):
        y = linear(x, w)
    y.backward(g)  # the backward pass may run outside
    assert y.dtype == x.grad.dtype == w.grad.dtype == torch.float32
    wanted = ((y, x @ w.T), (x.grad, g @ w), (w.grad, g.T @ x))
    for got, want in wanted:
        assert not torch.equal(got, want)
        assert float((got - want).detach().norm() / want.detach().norm()) < 0.01
    a, b = torch.randn(70, 128), torch.randn(96, 128)
    total = torch.ones(70, 96)
    with half_products(True):
        assert torch.equal(matmul_nt(a, b, wide=True), matmul_nt(a, b, wide=True))
        close(matmul_nt(a, b, wide=True), a.double() @ b.double().T)
        assert matmul_tn(a.T.contiguous(), b.T.contiguous(), accumulate=total) is total
        assert float((total - 1 - a @ b.T).norm() / (a @ b.T).norm()) < 0.01
        assert float((matmul_nn(a, b.T.contiguous()) - a @ b.T).norm() / (a @ b.T).norm()) < 0.01
    close(matmul_nt(a, b), a.double() @ b.double().T)


def test_precision_words():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert wants_half("bfloat16", cpu)
    assert not wants_half("float32", cpu)
    assert wants_half("auto", cpu) == has_fast_half()
    assert wants_half("auto", gpu) == (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_half_products_on_cuda():
    torch.manual_seed(5)
    x, w = (torch.randn(n, 128, device="cuda", requires_grad=True) for n in (70, 96))
    g = torch.randn(70, 96, device="cuda")
    with half_products(wants_half("auto", x.device)):
        y = linear(x, w)
        logits = matmul_nt(x.detach(), w.detach(), wide=True)
    y.backward(g)
    assert y.dtype == logits.dtype == x.grad.dtype == torch.float32
    for got, want in ((y, x @ w.T), (logits, x @ w.T), (x.grad, g @ w), (w.grad, g.T @ x)):
        assert not torch.equal(got, want)
        assert float((got - want).detach().norm() / want.detach().norm()) < 0.01
    assert torch.equal(linear(x, w), F.linear(x, w))


def test_lean_half_products_keep_no_rounded_weights_and_change_no_bit():
    torch.manual_seed(0)
    x, weight, grad = torch.randn(64, 96), torch.randn(80, 96), torch.randn(64, 80)
    found = []
    for lean in (False, True):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with half_products(True, lean=lean):
            out = linear(a, b)
            assert [t.dtype for t in out.grad_fn.next_functions[0][0].saved_tensors] == [torch.bfloat16, torch.float32 if lean else torch.bfloat16]
            out.backward(grad)
        found.append((out.detach(), a.grad, b.grad))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_half_products_are_one_threads_own() -> None:
    """Samples are checked by other threads while a step is under way: their logits must not be rounded for that."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(96, 128, generator=generator), torch.randn(160, 128, generator=generator)
    wide, found = matmul_nt(a, b), []
    with half_products(True):
        thread = threading.Thread(target=lambda: found.append(matmul_nt(a, b)))
        thread.start()
        thread.join()
        assert not matmul_nt(a, b).equal(wide)
    assert found[0].equal(wide)
