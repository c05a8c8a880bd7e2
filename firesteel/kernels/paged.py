"""Attention over keys and values that lie in blocks, for the flattened tokens of many sequences at once.

A `Plan` says where the tokens of a step stand: it is made once a step and used by every layer. Two passes a layer: `rotate_and_store` takes
the rows `[queries | keys | values]` of a fused projection, rotates queries and keys and puts keys and values into the cache; `attend` lets
every query see the positions that the plan allows it. Compiled C where there is a compiler (`paged_native`), else, and as the reference
in tests, PyTorch sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from firesteel.kernels import paged_native as native
from firesteel.kernels.paged_native import BLOCK
from firesteel.kernels.spans import Span


def is_compiled() -> bool:
    """Whether steps on this machine take the compiled passes, as far as their shapes allow it."""
    return native.library() is not None


def blocks_for(positions: int) -> int:
    """Blocks that hold this many positions."""
    return -(-positions // BLOCK)


@dataclass
class PagedCache:
    """Keys and values of one layer: `keys [blocks, heads, D, BLOCK]`, `values [blocks, heads, BLOCK, D]`, float32."""

    keys: Tensor
    values: Tensor


def make_caches(layers: int, blocks: int, heads: int, dim: int, device: torch.device) -> list[PagedCache]:
    """Empty caches."""
    return [PagedCache(torch.zeros(blocks, heads, dim, BLOCK, device=device), torch.zeros(blocks, heads, BLOCK, dim, device=device)) for _ in range(layers)]


@dataclass
class Plan:
    """Where a step's N tokens stand and what they see.

    Attributes:
        spans: their sequences.
        position: `[N]` int32.
        place: `[N]` int32, `block * BLOCK + slot` in the cache.
        low, high: `[N]` int32, positions that a token sees are `low <= p < high`.
        tables: `[sum of blocks]` int32, the sequences' blocks one after another.
        group: queries per key head that the tiles were cut for.
        tiles: for each group of tokens that is handled together: its first token, how many there are, where its blocks begin in `tables`.
    """

    spans: Sequence[Span]
    position: Tensor
    place: Tensor
    low: Tensor
    high: Tensor
    tables: Tensor
    group: int
    tiles: tuple[Tensor, Tensor, Tensor]


def make_plan(spans: Sequence[Span], group: int, *, window: int | None = None, causal: bool = True) -> Plan:
    """Plan for spans whose tokens see their sequence up to themselves; with `causal` False, up to their span's end.

    Args:
        group: queries that share a key head.
        window: positions seen at most, the token's own included.
    """
    position: list[int] = []
    place: list[int] = []
    high: list[int] = []
    tables: list[int] = []
    tiles: list[tuple[int, int, int]] = []
    most = max(1, native.ROWS // group)
    for span in spans:
        first = len(position)
        for p in range(span.start, span.end):
            position.append(p)
            place.append(span.blocks[p // BLOCK] * BLOCK + p % BLOCK)
            high.append(p + 1 if causal else span.end)
        tiles += [(first + i, min(most, span.count - i), len(tables)) for i in range(0, span.count, most)]
        tables += span.blocks
    low = [0] * len(position) if window is None else [max(0, p - window + 1) for p in position]
    ints = [torch.tensor(x, dtype=torch.int32) for x in (position, place, low, high, tables)]
    first_, tokens_, table_ = (torch.tensor(x, dtype=torch.int32) for x in zip(*tiles, strict=True))
    return Plan(spans, ints[0], ints[1], ints[2], ints[3], ints[4], group, (first_, tokens_, table_))


@dataclass(frozen=True)
class Rotary:
    """How queries and keys are prepared.

    Attributes:
        cos, sin: `[P, D / 2]` float32.
        interleaved: rotated pairs lie side by side (2i, 2i + 1); otherwise half a head apart.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def rotate_and_store(
    x: Tensor, queries: int, cache: PagedCache, plan: Plan, rotary: Rotary, norm: tuple[Tensor, float] | None = None, *, compiled: bool = True
) -> None:
    """Normalise and rotate queries and keys of `x` in place, and store keys and values.

    Args:
        x: `[N, (queries + 2 * heads) * D]`, contiguous float32.
        norm: weights `[queries + heads, D]` and epsilon of an RMSNorm over each head before the rotation.
        compiled: False takes the PyTorch path.
    """
    heads, dim = cache.keys.shape[1], cache.keys.shape[2]
    lib = native.library() if compiled and _fits(x, dim) else None
    if lib is not None:
        weight, eps = (None, 0.0) if norm is None else norm
        native.rotate_and_store(
            lib, x, queries, heads, weight, eps, rotary.cos, rotary.sin, rotary.interleaved, plan.position, plan.place, cache.keys, cache.values
        )
        return
    y = x.view(x.shape[0], queries + 2 * heads, dim)
    turned = y[:, : queries + heads]
    if norm is not None:
        turned = F.rms_norm(turned, (dim,), None, norm[1]) * norm[0]
    cos, sin = rotary.cos[plan.position.long(), None], rotary.sin[plan.position.long(), None]
    a, b = (turned[..., ::2], turned[..., 1::2]) if rotary.interleaved else turned.chunk(2, dim=-1)
    u, v = a * cos - b * sin, b * cos + a * sin
    y[:, : queries + heads] = torch.stack([u, v], dim=-1).flatten(-2) if rotary.interleaved else torch.cat([u, v], dim=-1)
    block, slot = plan.place.long() // BLOCK, plan.place.long() % BLOCK
    cache.keys[block, :, :, slot] = y[:, queries : queries + heads]
    cache.values[block, :, slot] = y[:, queries + heads :]


def attend(x: Tensor, queries: int, cache: PagedCache, plan: Plan, scale: float, *, compiled: bool = True) -> Tensor:
    """What the queries of `x` (see `rotate_and_store`, done before) gather: `[N, queries * D]`."""
    heads, dim = cache.keys.shape[1], cache.keys.shape[2]
    lib = native.library() if compiled and _fits(x, dim) and queries // heads == plan.group <= native.ROWS else None
    out = x.new_empty(x.shape[0], queries * dim)
    if lib is not None:
        native.attend(lib, x, out, queries, heads, plan.tiles, plan.low, plan.high, plan.tables, cache.keys, cache.values, scale)
        return out
    begin = 0
    for span in plan.spans:
        rows = slice(begin, begin + span.count)
        begin += span.count
        low, high = plan.low[rows, None], plan.high[rows, None]
        blocks = torch.tensor(span.blocks[: -(-int(high.max()) // BLOCK)])
        keys = cache.keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)  # [heads, positions, D]
        values = cache.values[blocks].transpose(0, 1).flatten(1, 2)
        key = torch.arange(keys.shape[1])
        seen = (key >= low) & (key < high)
        q = x[rows, : queries * dim].view(span.count, queries, dim).transpose(0, 1)
        mixed = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True)[0]
        out[rows] = mixed.transpose(0, 1).reshape(span.count, -1)
    return out


def _fits(x: Tensor, dim: int) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and dim <= native.MAX_DIM and dim % 2 == 0
