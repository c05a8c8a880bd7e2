"""Muon (Jordan et al. 2024): momentum whose update is made orthogonal by Newton-Schulz iterations.

As `torch.optim.Muon`, except for the iterations. Ours are three with a polynomial each instead of five of one kind, which train as well at half the cost
(docs/learning-log.md), and run in the precision in which this machine multiplies fast: PyTorch's always take bfloat16, which is ten times slower than
float32 on a processor without bfloat16 instructions.

Whole matrices are made orthogonal. With several processes each matrix has an owner that does so for all: of copies (DDP) it tells the others the
result, of shards (FSDP2) it gathers the matrix first and gives everyone his part of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from firesteel.kernels.linear import matmul_nn, matmul_nt, wants_half
from firesteel.training.parallel import ALONE, World
from firesteel.training.replica import shares_of

# Odd quintics, one after the other the nearest to 1 in the largest error over what the one before leaves of [0.005, 1] (Amsel et al. 2025,
# Polar Express), with 1 % of room above: singular values of that range end between 0.49 and 1.51.
QUINTICS = ((8.218601, -23.719981, 17.218525), (3.883271, -2.841130, 0.533090), (3.166769, -2.331588, 0.477278))
_TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """For matrices only; the rate of a matrix with more rows than columns is raised by the root of that ratio.

    Args:
        precision: of the iterations: `auto`, `float32` or `bfloat16`.
        world: the processes whose gradients these are. All have the same parameters, or shards of them, and the sum of all gradients.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        precision: str = "auto",
        world: World = ALONE,
    ) -> None:
        super().__init__(list(params), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.precision, self.world = precision, world

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of all matrices that have a gradient."""
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            # As many matrices at a time as there are processes, of about the same cost, one for each.
            ready.sort(key=lambda p: p.numel() * min(p.shape), reverse=True)
            for i in range(0, len(ready), self.world.size):
                turn = ready[i : i + self.world.size]
                for p, update in zip(turn, self._updates(turn, group["momentum"]), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))

    def _updates(self, turn: list[Tensor], momentum: float) -> list[Tensor]:
        """Orthogonal updates of at most one matrix for each process, laid out as their parameters are."""
        wanted = []
        for p in turn:
            assert p.grad is not None, "only those that have one"
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            held = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
            wanted.append(p.grad.lerp(held, momentum))  # Nesterov
        updates = []
        for owner, update in enumerate(wanted):
            whole = update.full_tensor() if isinstance(update, DTensor) else update
            own = owner == self.world.rank
            updates.append(whole if own else torch.empty_like(whole))
        if self.world.rank < len(turn):
            mine = self.world.rank
            updates[mine] = orthogonalise(updates[mine], wants_half(self.precision, turn[mine].device))
        if self.world.size == 1:
            return updates
        for owner, p in enumerate(turn):
            updates[owner] = updates[owner].contiguous()
            if isinstance(p, DTensor):
                updates[owner] = shares_of(updates[owner], owner, p)
            else:
                dist.broadcast(updates[owner], src=owner)
        return updates


def orthogonalise(matrix: Tensor, half: bool) -> Tensor:
    """`[m, n]` -> the matrix of the same singular vectors with all singular values near 1, by Newton-Schulz iterations; in bfloat16 where `half`."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = (x / x.norm().clamp(min=_TINY)).to(torch.bfloat16 if half else matrix.dtype).contiguous()
    # Wide ones are multiplied by the product of all polynomials of their Gram matrix. That one has the squares of their values: too much for bfloat16.
    x = _by_gram(x) if not half and 2 * x.shape[1] > 3 * x.shape[0] else _by_rows(x)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


def _by_rows(x: Tensor) -> Tensor:
    """The iterations on `[m, n]`: `x <- (a + b x x^T + c (x x^T)^2) x`."""
    for a, b, c in QUINTICS:
        gram = matmul_nt(x, x)
        if x.dtype == torch.bfloat16:  # sums are rounded once, not after every term
            factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, factor, x, beta=a)
        else:
            x = matmul_nn(_polynomial(gram, a, b, c), x)
    return x


def _by_gram(x: Tensor) -> Tensor:
    """The same with two products as wide as `x` in all: what an iteration makes of `x x^T` follows from it alone, as polynomials of one matrix commute."""
    gram = matmul_nt(x, x)
    whole = factor = _polynomial(gram, *QUINTICS[0])
    for quintic in QUINTICS[1:]:
        gram = matmul_nn(matmul_nn(factor, gram), factor)
        factor = _polynomial(gram, *quintic)
        whole = matmul_nn(factor, whole)
    return matmul_nn(whole, x)


def _polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """`a + b gram + c gram^2`, all `[m, m]`."""
    value = matmul_nn(gram, gram).mul_(c).add_(gram, alpha=b)
    value.diagonal().add_(a)
    return value
