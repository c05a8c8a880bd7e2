"""Fast products of float32 tensors. On a CPU: ATen's BLAS or oneDNN, whichever suits the processor.

ATen multiplies float32 with MKL, which on processors without AVX-512 (and on AMD in particular) multiplies by a transposed
matrix at half the speed of oneDNN or worse, above all when one side is a vocabulary. oneDNN is reachable as the fused linear
operator that Inductor uses. `FIRESTEEL_MATMUL=torch` or `=onednn` overrides the choice.

Inside `half_products(True)` the products of a training step are computed in bfloat16 with float32 accumulation, on a CPU rounded to
bfloat16 and widened again (weights and sums over products stay float32); worth it where bfloat16 is multiplied natively (`has_fast_half`, CUDA).

Everything else (other dtypes, CUDA outside of that, meta, subclasses, tracing, autocast) takes the plain torch product.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from firesteel.errors import RecipeError

SMALLEST = 1 << 18  # multiply-adds below which the dispatch itself would dominate


class _Mode(threading.local):
    """Of one thread: beside a training step others multiply, too, such as those that check samples on arrival."""

    half = lean = False


_mode = _Mode()


@contextmanager
def half_products(on: bool, *, lean: bool = False) -> Iterator[None]:
    """Within, this thread's products of plain float32 tensors run in bfloat16, apart from those that ask to be `wide`.

    Args:
        lean: `linear` rounds weights again in the backward pass, to the same bits, and keeps no rounded copy of them till then.
    """
    before = _mode.half, _mode.lean
    _mode.half, _mode.lean = on, lean
    try:
        yield
    finally:
        _mode.half, _mode.lean = before


@cache
def has_fast_half() -> bool:
    """Whether this processor has instructions for bfloat16 products (AVX512-BF16 or AMX): there they take a third of float32's time."""
    return bool(torch.backends.mkldnn.is_available() and {"avx512_bf16", "amx_bf16"} & _flags())


def wants_half(precision: str, device: torch.device) -> bool:
    """What a recipe's `precision` (auto, float32, bfloat16) means on this device."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cpu":
        return has_fast_half()
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def widened(a: Tensor, b: Tensor) -> Tensor:
    """`a [n, k] @ b [k, m]` of bfloat16 or float16 factors, in float32, outside autograd. On CUDA the sums are not rounded in between."""
    with torch.no_grad():
        return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else (a @ b).float()


def attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the precision that attention on CUDA takes them in: bfloat16 within `half_products`. With gradients."""
    half = _mode.half and all(t.is_cuda and t.dtype == torch.float32 for t in tensors)
    return tuple(t.bfloat16() for t in tensors) if half else tensors


def matmul_nt(a: Tensor, b: Tensor, *, add: Tensor | None = None, wide: bool = False) -> Tensor:
    """`a [n, k] @ b [m, k].T (+ add [n, m])` -> `[n, m]`, outside autograd. `add` may be overwritten; use the result instead.

    `wide` is for logits, whose rounding would disturb a softmax: within `half_products` too they are summed up in float32, on a CPU of float32 factors.
    """
    with torch.no_grad():
        if _in_half(a, b) and (a.is_cuda or not wide):
            product = widened(a.bfloat16(), b.bfloat16().T)
            return product if add is None else add.add_(product)
        if _backend("nt", a, b, a.shape[0], a.shape[1], b.shape[0]) == "onednn":
            return _onednn_nt(a, b) if add is None else torch.ops.mkldnn._linear_pointwise.binary(a, add, b, None, "add")
        return a @ b.T if add is None else add.addmm_(a, b.T)


def matmul_nn(a: Tensor, b: Tensor) -> Tensor:
    """`a [n, k] @ b [k, m]` -> `[n, m]`, outside autograd."""
    with torch.no_grad():
        if _in_half(a, b):
            return widened(a.bfloat16(), b.bfloat16())
        return _onednn_nn(a, b) if _backend("nn", a, b, a.shape[0], a.shape[1], b.shape[1]) == "onednn" else a @ b


def matmul_tn(a: Tensor, b: Tensor, *, accumulate: Tensor | None = None) -> Tensor:
    """`a [k, n].T @ b [k, m]` -> `[n, m]`, outside autograd; added to `accumulate` in place where given.

    oneDNN's operator copies `a` transposed first: with AVX-512 that pays, without it costs what it wins.
    """
    with torch.no_grad():
        if _in_half(a, b):
            product = widened(a.bfloat16().T, b.bfloat16())
        elif _wide_vectors() and _backend("tn", a, b, a.shape[1], a.shape[0], b.shape[1]) == "onednn":
            product = _onednn_nt(a.T, b.T)
        else:
            return a.T @ b if accumulate is None else accumulate.addmm_(a.T, b)
        return product if accumulate is None else accumulate.add_(product)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x [..., k] @ weight [m, k].T` -> `[..., m]` with gradients for both; as `torch.nn.functional.linear` without bias."""
    if not (_on_cpu(x, weight) or _in_half(x, weight)) or x.numel() == 0 or weight.numel() == 0:
        return F.linear(x, weight)
    out = _Linear.apply(x.reshape(-1, x.shape[-1]), weight)
    return out.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        if _in_half(x, weight):
            x, rounded = x.bfloat16(), weight.bfloat16()
            ctx.save_for_backward(x, weight if _mode.lean else rounded)
            return widened(x, rounded.T)
        ctx.save_for_backward(x, weight)
        return matmul_nt(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight = ctx.needs_input_grad  # type: ignore[attr-defined]
        if x.dtype == torch.bfloat16:
            grad, weight = grad.bfloat16(), weight.bfloat16()
            return widened(grad, weight) if needs_x else None, widened(grad.T, x) if needs_weight else None
        grad = grad.contiguous()
        return matmul_nn(grad, weight) if needs_x else None, matmul_tn(grad, x) if needs_weight else None


def _backend(form: str, a: Tensor, b: Tensor, n: int, k: int, m: int) -> str:
    """`torch` or `onednn` for a product of n x k x m."""
    if n * k * m < SMALLEST or not _on_cpu(a, b) or not (_rows_or_columns(a) and _rows_or_columns(b)) or not _has_onednn():
        return "torch"
    pinned = os.environ.get("FIRESTEEL_MATMUL", "auto")
    if pinned == "auto":
        return preferred()
    if pinned not in ("torch", "onednn"):
        raise RecipeError(f"FIRESTEEL_MATMUL={pinned} is neither auto, torch nor onednn", mend="unset FIRESTEEL_MATMUL")
    return pinned


@cache
def preferred() -> str:
    """What this processor's products go through: ATen's BLAS on Intel's with AVX-512, else oneDNN.

    MKL takes its fast paths on Intel's own processors; on an AMD Zen 5 with AVX-512 oneDNN multiplies twice as fast (measured).
    A rule and not a probe, so that a resumed run computes the same bits as the one that was interrupted.
    """
    return "torch" if _wide_vectors() and "GenuineIntel" in _flags() else "onednn"


def _wide_vectors() -> bool:
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


@cache
def _flags() -> frozenset[str]:
    """The first processor's vendor and feature flags as /proc/cpuinfo has them; empty where it cannot be read."""
    found: set[str] = set()
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                name, _, value = line.partition(":")
                if name.strip() in ("vendor_id", "flags"):
                    found |= set(value.split())
                if not line.strip():
                    break
    except OSError:
        pass
    return frozenset(found)


def _in_half(a: Tensor, b: Tensor) -> bool:
    return _mode.half and _plain_float32(a, b)


def _onednn_nt(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def _onednn_nn(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")


def _rows_or_columns(x: Tensor) -> bool:
    return x.is_contiguous() or x.T.is_contiguous()


def _on_cpu(a: Tensor, b: Tensor) -> bool:
    return a.device.type == "cpu" and _plain_float32(a, b)


def _plain_float32(a: Tensor, b: Tensor) -> bool:
    plain = (Tensor, torch.nn.Parameter)
    return (
        a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type
        and a.device.type in ("cpu", "cuda")
        and type(a) in plain
        and type(b) in plain
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(a.device.type)
    )


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
