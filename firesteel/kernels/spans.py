"""Span: consecutive positions of one sequence in a cache of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """`count` positions from `start` on.

    Attributes:
        key: names the sequence, for caches that keep one by one.
        blocks: blocks of the sequence in order; position p lies in block `p // size` of them.
    """

    key: int
    blocks: Sequence[int]
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count
