"""Who is computed with whom: cuts the valid slots into chunks of whole blocks and plans the teacher's rows for them.

Neighbouring blocks predict overlapping positions. The teacher's probabilities live in a buffer of fixed height; where a chunk
needs rows that are not there, the buffer keeps what is still needed and takes as many further rows as fit. For blocks sorted by
anchor every teacher row is thereby computed exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Refill:
    """New content of the teacher's buffer: first the old rows `keep` (places in the buffer), then the teacher rows `fresh`."""

    keep: Tensor
    fresh: Tensor


@dataclass
class Chunk:
    """Some whole blocks.

    Attributes:
        blocks: `[b]` int64, numbers of the blocks.
        rows: `[n]` int64, flat numbers of their valid slots.
        place: `[n]` int64, where in the teacher's buffer each slot's distribution lies.
        refill: what to do to the buffer first; None where everything is there.
    """

    blocks: Tensor
    rows: Tensor
    place: Tensor
    refill: Refill | None


def teacher_height(chunk_rows: int, block_size: int) -> int:
    """Rows of the teacher's buffer: as many as a chunk's slots can need, and room for two blocks that reach over its edges."""
    return max(chunk_rows, block_size) + 2 * block_size


def make_plan(slot_target: Tensor, valid: Tensor, chunk_rows: int) -> list[Chunk]:
    """Chunks of at most `chunk_rows` valid slots (or one block), of about equal size, in ascending order of teacher rows.

    Args:
        slot_target: `[N, g]` int64 teacher row of each slot.
        valid: `[N, g]` bool.
        chunk_rows: most slots per chunk.
    """
    device, g = slot_target.device, slot_target.shape[1]
    targets, flags = slot_target.tolist(), valid.tolist()
    needs = {n: [(n * g + k, targets[n][k]) for k in range(g) if flags[n][k]] for n in range(len(targets))}
    order = sorted((n for n in needs if needs[n]), key=lambda n: needs[n][0][1])
    groups = _groups(order, needs, chunk_rows)
    wanted = [list(dict.fromkeys(t for n in group for _, t in needs[n])) for group in groups]

    chunks: list[Chunk] = []
    places: dict[int, int] = {}
    for i, group in enumerate(groups):
        refill = None
        if any(t not in places for t in wanted[i]):
            content = _content(wanted[i:], teacher_height(chunk_rows, g))
            keep, fresh = [t for t in content if t in places], [t for t in content if t not in places]
            refill = Refill(_index([places[t] for t in keep], device), _index(fresh, device))
            places = {t: j for j, t in enumerate(keep + fresh)}
        slots = [pair for n in group for pair in needs[n]]
        chunks.append(Chunk(_index(group, device), _index([r for r, _ in slots], device), _index([places[t] for _, t in slots], device), refill))
    return chunks


def _groups(order: list[int], needs: dict[int, list[tuple[int, int]]], chunk_rows: int) -> list[list[int]]:
    total = sum(len(needs[n]) for n in order)
    fair = -(-total // max(1, -(-total // chunk_rows)))  # equal chunks rather than full ones and a rest
    groups: list[list[int]] = []
    used = 0
    for n in order:
        size = len(needs[n])
        if not groups or used >= fair or used + size > chunk_rows:
            groups.append([])
            used = 0
        groups[-1].append(n)
        used += size
    return groups


def _content(wanted: list[list[int]], height: int) -> list[int]:
    """The teacher rows of as many chunks, from the first on, as fit."""
    content: dict[int, None] = {}
    for rows in wanted:
        more = {t: None for t in rows if t not in content}
        if content and len(content) + len(more) > height:
            break
        content |= more
    return list(content)


def _index(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
