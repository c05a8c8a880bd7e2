"""The plan: every valid slot once, every slot finds its teacher row, every teacher row is computed once."""

from __future__ import annotations

import pytest
import torch

from firesteel.losses.plan import make_plan, teacher_height


def blocks(count, slots, reach, seed):
    """Sorted overlapping blocks, as batching makes them: slot targets number the unique positions."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, reach, (count,), generator=generator).sort().values
    valid = torch.rand(count, slots, generator=generator) > 0.2
    positions = starts[:, None] + torch.arange(slots)
    target = torch.full((count, slots), -1)
    target[valid] = positions[valid].unique(return_inverse=True)[1]
    return target, valid


def replay(plan, target, chunk_rows):
    """Follow the plan with row numbers in place of rows; returns (slots seen, teacher rows computed)."""
    buffer, seen, computed = torch.full((teacher_height(chunk_rows, target.shape[1]),), -1), [], []
    for chunk in plan:
        if chunk.refill is not None:
            content = torch.cat([buffer[chunk.refill.keep], chunk.refill.fresh])
            assert content.shape[0] <= buffer.shape[0]
            buffer[: content.shape[0]] = content
            computed += chunk.refill.fresh.tolist()
        assert torch.equal(buffer[chunk.place], target.view(-1)[chunk.rows])
        assert set((chunk.rows // target.shape[1]).tolist()) == set(chunk.blocks.tolist())
        seen += chunk.rows.tolist()
    return seen, computed


@pytest.mark.parametrize("chunk_rows", [1, 16, 64, 10_000])
@pytest.mark.parametrize("reach", [20, 200, 5000])
def test_sorted_blocks(reach, chunk_rows):
    target, valid = blocks(60, 8, reach, seed=reach)
    plan = make_plan(target, valid, chunk_rows)
    seen, computed = replay(plan, target, chunk_rows)
    assert sorted(seen) == valid.view(-1).nonzero()[:, 0].tolist()
    assert sorted(computed) == list(range(int(target.max()) + 1))  # each exactly once
    assert all(chunk.rows.shape[0] <= max(8, chunk_rows) for chunk in plan)


def test_whole_blocks_stay_together():
    target, valid = blocks(60, 8, 200, seed=1)
    owners = [set(chunk.blocks.tolist()) for chunk in make_plan(target, valid, 20)]
    assert sum(len(o) for o in owners) == len(set.union(*owners))


def test_scattered_targets_are_still_right():
    target = torch.randperm(60 * 8).view(60, 8)
    seen, computed = replay(make_plan(target, torch.ones(60, 8, dtype=torch.bool), 32), target, 32)
    assert sorted(seen) == sorted(computed) == list(range(480))


def test_chunks_are_of_about_equal_size():
    target, valid = blocks(130, 8, 2000, seed=3)
    sizes = [chunk.rows.shape[0] for chunk in make_plan(target, valid, 128)]
    assert min(sizes) > max(sizes) - 24


def test_nothing_valid():
    assert make_plan(torch.full((3, 2), -1), torch.zeros(3, 2, dtype=torch.bool), 8) == []
