"""How much each slot of a block counts.

A block of g slots drafts tokens 1, 2, ... in order. With `sample_from_anchor` slot k drafts token k + 1; without it slot 0 drafts
nothing (weight 0) and slot k drafts token k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exponential_weights(block_size: int, sample_from_anchor: bool, decay: float) -> Tensor:
    """`[g]` float32, `exp(-(k-1)/decay)` for the slot that drafts the k-th token (DFlash, arXiv 2602.06036)."""
    number = _token_numbers(block_size, sample_from_anchor)
    return torch.where(number > 0, torch.exp(-(number - 1) / decay), 0.0)


def uniform_weights(block_size: int, sample_from_anchor: bool) -> Tensor:
    """`[g]` float32, 1 for every slot that drafts a token. Also the validity that D-PACE starts from."""
    return (_token_numbers(block_size, sample_from_anchor) > 0).float()


def dpace_weights(q: Tensor, valid: Tensor, smoothing: float) -> Tensor:
    """Contribution of each slot to the expected acceptance length (D-PACE, arXiv 2605.18810).

    `w_j = sum_{m >= j} prod_{i <= m} q~_i` with `q~ = (1 - smoothing) q + smoothing`.

    The chain of a block begins at its first valid slot and ends before the next invalid one: nothing is accepted
    beyond a token that is not there, so valid slots further right get weight 0.

    Args:
        q: `[N, g]` draft's probability of the true token; used detached.
        valid: `[N, g]` bool.
        smoothing: share of 1 mixed into q, in [0, 1].

    Returns:
        `[N, g]` in the dtype of q.
    """
    started = valid.cumsum(-1) > 0
    alive = started & (started & ~valid).cumsum(-1).eq(0)
    smooth = (1 - smoothing) * q.detach() + smoothing
    survival = torch.where(alive, smooth, (~started).to(q.dtype)).cumprod(-1) * alive
    return survival.flip(-1).cumsum(-1).flip(-1) * alive


def _token_numbers(block_size: int, sample_from_anchor: bool) -> Tensor:
    return torch.arange(block_size, dtype=torch.float32) + (1 if sample_from_anchor else 0)
