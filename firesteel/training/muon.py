"""Muon (Jordan et al. 2024): momentum whose update is made orthogonal by Newton-Schulz iterations.

As `torch.optim.Muon`, except that the iterations run in the precision in which this machine multiplies fast: PyTorch's always take bfloat16,
which is ten times slower than float32 on a processor without bfloat16 instructions.

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

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steep at zero, singular values end between 0.7 and 1.2
_STEPS = 5
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
    """`[m, n]` -> its nearest matrix with all singular values near 1, by Newton-Schulz iterations; in bfloat16 where `half`."""
    a, b, c = _COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = (x / x.norm().clamp(min=_TINY)).to(torch.bfloat16 if half else matrix.dtype).contiguous()
    for _ in range(_STEPS):
        gram = matmul_nt(x, x)
        if half:
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        else:
            x = matmul_nn(matmul_nn(gram, gram).mul_(c).add_(gram, alpha=b), x).add_(x, alpha=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
