"""Anchors: the known tokens from which blocks are drafted, chosen as serving would meet them.

In serving an anchor is always a token that the target itself produced (the first is the first token of its answer), and
the token after it is again the target's. So training anchors are supervised tokens with a supervised successor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seeded(*parts: int) -> torch.Generator:
    """A generator for one purpose, from e.g. (seed, epoch, batch number): work can resume anywhere without replaying what came before."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def eligible_anchors(loss_mask: Tensor) -> Tensor:
    """Positions whose token and whose next token are both supervised: `[T]` bool -> `[E]` int64, ascending."""
    return (loss_mask[:-1] & loss_mask[1:]).nonzero(as_tuple=True)[0]


def sample_anchors(eligible: Sequence[Tensor], anchors: int, generator: torch.Generator) -> list[Tensor]:
    """At most `anchors` anchors for the documents of a batch, drawn per document without replacement.

    Args:
        eligible: `[E_i]` int64 of each document, from `eligible_anchors`.
        anchors: most blocks in the batch; with fewer eligible positions all are taken.

    Returns:
        `[A_i]` int64 of each document, ascending; the A_i are proportional to the E_i.
    """
    shares = _shares([e.shape[0] for e in eligible], anchors)
    return [e[torch.randperm(e.shape[0], generator=generator)[:n]].sort().values for e, n in zip(eligible, shares, strict=True)]


def spaced_anchors(eligible: Sequence[Tensor], anchors: int | None) -> list[Tensor]:
    """Like `sample_anchors`, without chance: evenly spaced over each document's eligible positions; None takes all."""
    lengths = [e.shape[0] for e in eligible]
    shares = lengths if anchors is None else _shares(lengths, anchors)
    return [e[torch.arange(n) * e.shape[0] // max(n, 1)] for e, n in zip(eligible, shares, strict=True)]


def _shares(lengths: Sequence[int], total: int) -> list[int]:
    """Split `total` in proportion to `lengths`, by largest remainder (ties: the earlier); no share exceeds its length."""
    whole = sum(lengths)
    if whole <= total:
        return list(lengths)
    shares = [total * n // whole for n in lengths]
    by_remainder = sorted(range(len(lengths)), key=lambda i: -(total * lengths[i] % whole))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
