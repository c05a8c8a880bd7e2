"""A long batch shared by several ranks: each has some of its blocks and some of its context, and gathers what all of them attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part.

    Attributes:
        rank: which part, 0 .. size - 1.
        size: parts.
        group: the process group of these ranks, in the order of the parts.
    """

    rank: int
    size: int
    group: Any

    def rows(self, count: int) -> slice:
        """The rows of `count` that are this rank's: neighbours, the same number on every rank but for the last ones."""
        each = -(-count // self.size)
        return slice(min(count, self.rank * each), min(count, (self.rank + 1) * each))

    def whole(self, part: Tensor, count: int) -> Tensor:
        """This rank's rows of a tensor `[count, ...]` -> all of it; its gradient comes back to the rank that made the rows, summed over all ranks.
        A collective, and another one in the backward pass."""
        return _Whole.apply(part, count, self)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, count: int, share: Share) -> Tensor:
        ctx.share, ctx.own = share, part.shape[0]  # type: ignore[attr-defined]
        padded = _padded(part, -(-count // share.size))
        out = part.new_empty(share.size * padded.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(out, padded, group=share.group)
        return out[:count]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        share, own = ctx.share, ctx.own  # type: ignore[attr-defined]
        each = -(-grad.shape[0] // share.size)
        out = grad.new_empty(each, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, _padded(grad, share.size * each), group=share.group)
        return out[:own], None, None


def _padded(x: Tensor, rows: int) -> Tensor:
    """`x` with zeros behind it up to so many rows."""
    if x.shape[0] == rows:
        return x.contiguous()
    out = x.new_zeros(rows, *x.shape[1:])
    out[: x.shape[0]] = x
    return out
