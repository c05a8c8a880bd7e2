"""Logits of a few tokens a row, with a gradient for the rows: what a loss of its own needs beside the fused head-and-loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

_GATHERED = 1 << 22  # numbers of the head that are gathered at a time


def token_logits(states: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """`states [R, h]`, frozen `head [V, h]`, `tokens [R, n]` -> `head[tokens] . states`, `[R, n]` in the states' dtype.

    The rows of the head are gathered a part at a time, in both directions: R * n of them together would be as large as a batch's logits.
    """
    return _TokenLogits.apply(states, head.detach(), tokens)


class _TokenLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, states: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(head, tokens)
        out = states.new_empty(tokens.shape)
        for rows in _parts(tokens, head):
            out[rows] = torch.bmm(head[tokens[rows]].to(states.dtype), states[rows, :, None])[..., 0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        head, tokens = ctx.saved_tensors  # type: ignore[attr-defined]
        out = grad.new_empty(tokens.shape[0], head.shape[1])
        for rows in _parts(tokens, head):
            out[rows] = torch.bmm(grad[rows, None], head[tokens[rows]].to(grad.dtype))[:, 0]
        return out, None, None


def _parts(tokens: Tensor, head: Tensor) -> list[slice]:
    size = max(1, _GATHERED // (tokens.shape[1] * head.shape[1]))
    return [slice(first, first + size) for first in range(0, tokens.shape[0], size)]
