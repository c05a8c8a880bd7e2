"""The compiled passes over blocks of keys equal PyTorch's attention on the same positions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from firesteel.kernels import paged_native
from firesteel.kernels.paged import BLOCK, PagedCache, Rotary, attend, make_caches, make_plan, rotate_and_store
from firesteel.kernels.spans import Span

BLOCKS = 40
SHAPES = {
    "smollm": (9, 3, 64, False, False, None, True),
    "qk norm and window": (9, 3, 64, True, True, 7, True),
    "blocks see themselves": (4, 2, 8, False, True, None, False),
    "odd width, window": (6, 1, 24, True, False, 5, False),
    "one head each": (8, 8, 128, False, False, None, True),
    "window longer than a block": (4, 4, 16, False, False, 33, True),
}


def spans() -> list[Span]:
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    return [Span(1, order[:5], 30, 9), Span(2, order[5:8], 0, 1), Span(3, order[8:20], 3, 70), Span(4, order[20:24], 47, 8)]


def rotary(dim: int, interleaved: bool) -> Rotary:
    angle = torch.rand(200, dim // 2, generator=torch.Generator().manual_seed(2)) * 6
    return Rotary(angle.cos(), angle.sin(), interleaved)


@pytest.mark.parametrize("name", SHAPES)
def test_compiled_equals_plain(name: str) -> None:
    queries, heads, dim, interleaved, norm, window, causal = SHAPES[name]
    assert paged_native.library() is not None, "this machine has no C compiler"
    generator = torch.Generator().manual_seed(0)
    cache = make_caches(1, BLOCKS, heads, dim, torch.device("cpu"))[0]
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    other = copy.deepcopy(cache)
    plan = make_plan(spans(), queries // heads, window=window, causal=causal)
    x = torch.randn(len(plan.position), (queries + 2 * heads) * dim, generator=generator)
    y = x.clone()
    weights = (torch.rand(queries + heads, dim, generator=generator) + 0.5, 1e-5) if norm else None
    rotate_and_store(x, queries, cache, plan, rotary(dim, interleaved), weights)
    rotate_and_store(y, queries, other, plan, rotary(dim, interleaved), weights, compiled=False)
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.keys, other.keys, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.values, other.values)
    mine = attend(x, queries, cache, plan, dim**-0.5)
    torch.testing.assert_close(mine, attend(y, queries, other, plan, dim**-0.5, compiled=False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_against_attention_written_out(compiled: bool) -> None:
    """One sequence, written in pieces into scattered blocks, against softmax over all of its positions."""
    queries, heads, dim, n = 4, 2, 8, 45
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, h, dim, generator=generator) for h in (queries, heads, heads))
    still = Rotary(torch.ones(n, dim // 2), torch.zeros(n, dim // 2))
    cache = make_caches(1, 8, heads, dim, torch.device("cpu"))[0]
    blocks, rows = [5, 0, 7], []
    for begin, end in ((0, 17), (17, 18), (18, 45)):
        plan = make_plan([Span(0, blocks, begin, end - begin)], queries // heads)
        x = torch.cat([t[begin:end].flatten(1) for t in (q, k, v)], dim=1)
        rotate_and_store(x, queries, cache, plan, still, compiled=compiled)
        rows.append(attend(x, queries, cache, plan, 0.3, compiled=compiled))
    wanted = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(torch.cat(rows), wanted[0].transpose(0, 1).flatten(1), rtol=1e-4, atol=1e-5)


def test_keys_alone_are_stored_without_queries() -> None:
    cache: PagedCache = make_caches(1, 4, 2, 8, torch.device("cpu"))[0]
    plan = make_plan([Span(0, [2, 1], 14, 4)], 1)
    x = torch.randn(4, 32)
    kept = x.clone()
    rotate_and_store(x, 0, cache, plan, Rotary(torch.ones(32, 4), torch.zeros(32, 4)))
    assert torch.equal(cache.values[2, :, 14], kept[0, 16:].view(2, 8))
    assert torch.equal(cache.keys[1, :, :, 1], kept[3, :16].view(2, 8))
    assert BLOCK == paged_native.BLOCK == 16
