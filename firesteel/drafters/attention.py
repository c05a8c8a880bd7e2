"""Attention of draft blocks in training: a dense reference, a grouped fast path and FlexAttention, which agree.

Who sees what. A block with its anchor at packed index a has query positions pos(a) + k. Query k sees
  - context t of its own document with t < a, in a sliding layer only where pos(a) + k - pos(t) < window (as vLLM slides:
    the window counts the query itself, so the last window - 1 positions before it);
  - the slots of its own block: all of them, or with `causal` only slots <= k. (A block is never longer than the window.)
Drafters that compute a block slot by slot ask for the last `queries` slots only; drafters whose keys pair a token with the state before it
have none at the first `skip` positions of a document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from firesteel.batches.batch import Batch
from firesteel.batches.share import Share
from firesteel.errors import RecipeError
from firesteel.kernels.linear import attended

Pair = tuple[Tensor, Tensor]
# (queries [N, q, H, D], keys and values of the context, each [T, Hkv, D], of the block, each [N, g, Hkv, D]) -> [N, q, H, D]; q = g by default
Attend = Callable[[Tensor, Pair, Pair], Tensor]
Path = Literal["auto", "fast", "dense", "flex"]

# Query rows of a group in the fast path. Larger groups spend more on slots of other blocks that they mask, smaller ones more on calls.
_GROUP_ROWS = 128


@dataclass(frozen=True)
class Group:
    """Anchors `first : last` (numbers in the batch) of one document, and the context `low : high` (packed) that any of them sees."""

    first: int
    last: int
    low: int
    high: int


@dataclass(frozen=True)
class Geometry:
    """Where blocks and context stand; made once per batch, the same for all layers with the same window.

    Attributes:
        document, position: `[T]` int64 of the context.
        anchors: `[N]` int64, packed index, ascending.
        block_size: slots of a block, g.
        window: sliding window in positions, or None.
        causal: slots see only earlier slots of their block.
        queries: how many slots ask, the last ones of each block; None: all.
        skip: first positions of a document that nobody sees.
    """

    document: Tensor
    position: Tensor
    anchors: Tensor
    block_size: int
    window: int | None
    causal: bool
    queries: int | None = None
    skip: int = 0

    @property
    def asking(self) -> int:
        return self.block_size if self.queries is None else self.queries


def make_geometry(batch: Batch, window: int | None, causal: bool) -> Geometry:
    """The geometry of a batch for layers with this window."""
    return Geometry(batch.document, batch.position, batch.anchors, batch.block_size, window, causal)


def make_attend(path: Path, geometry: Geometry, share: Share | None = None) -> Attend:
    """Choose the implementation; `auto` takes flex on CUDA and fast elsewhere.

    Args:
        share: with it, keys and values of the context come as this rank's rows, and are gathered first.

    Raises:
        RecipeError: an unknown path.
    """
    if share is not None:
        attend, tokens = make_attend(path, geometry), geometry.document.shape[0]
        return lambda q, context, block: attend(q, (share.whole(context[0], tokens), share.whole(context[1], tokens)), block)
    if path == "auto":
        path = "flex" if geometry.anchors.device.type == "cuda" else "fast"
    if path == "dense":
        mask = dense_mask(geometry)
        return lambda q, context, block: dense_attention(q, context, block, mask)
    if path == "fast":
        groups = make_groups(geometry)
        return lambda q, context, block: _Grouped.apply(q, *context, *block, geometry, groups)
    if path == "flex":
        block_mask = flex_mask(geometry)
        return lambda q, context, block: flex(q, context, block, block_mask)
    raise RecipeError(f"there is no attention path {path!r}", mend="one of auto, fast, dense, flex")


# -- dense: the definition, written out ---------------------------------------------------------------------------------


def dense_mask(geometry: Geometry) -> Tensor:
    """`[N*q, T + N*g]` bool, True where a slot sees a key (context first, then all slots)."""
    g, asking, n = geometry.block_size, geometry.asking, geometry.anchors.shape[0]
    t = torch.arange(geometry.document.shape[0], device=geometry.anchors.device)
    anchor = geometry.anchors.repeat_interleave(asking)[:, None]  # [N*q, 1]
    slot = torch.arange(g - asking, g, device=anchor.device).repeat(n)[:, None]
    context = (geometry.document == geometry.document[anchor]) & (t < anchor) & (geometry.position >= geometry.skip)
    if geometry.window is not None:
        context &= geometry.position[anchor] + slot - geometry.position < geometry.window
    number = torch.arange(n, device=anchor.device)
    own = number.repeat_interleave(asking)[:, None] == number.repeat_interleave(g)
    if geometry.causal:
        own &= slot >= torch.arange(g, device=anchor.device).repeat(n)
    return torch.cat([context, own], dim=1)


def dense_attention(q: Tensor, context: Pair, block: Pair, mask: Tensor) -> Tensor:
    """Softmax attention over `[N*q, T + N*g]` scores; memory grows with slots times keys."""
    n, g, heads, dim = q.shape
    k, v = (torch.cat([c, b.flatten(0, 1)]).repeat_interleave(heads // c.shape[1], dim=1) for c, b in zip(context, block, strict=True))
    scores = torch.einsum("qhd,khd->hqk", q.flatten(0, 1), k) * dim**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).view(n, g, heads, dim)


# -- fast: groups of neighbouring blocks of one document ----------------------------------------------------------------


def make_groups(geometry: Geometry) -> list[Group]:
    """Split the sorted anchors into runs of one document whose blocks have about `_GROUP_ROWS` slots together."""
    # With few queries a block, reading the context once for many of them outweighs the keys of other blocks.
    size = max(1, _GROUP_ROWS // geometry.block_size if geometry.queries is None else _GROUP_ROWS // (2 * geometry.asking))
    anchors = geometry.anchors.tolist()
    documents = geometry.document[geometry.anchors].tolist()
    starts = (geometry.anchors - geometry.position[geometry.anchors] + geometry.skip).tolist()
    groups: list[Group] = []
    first = 0
    while first < len(anchors):
        last = first + 1
        while last < len(anchors) and last - first < size and documents[last] == documents[first]:
            last += 1
        low = starts[first] if geometry.window is None else max(starts[first], anchors[first] - geometry.window + 1)
        groups.append(Group(first, last, low, max(low, anchors[last - 1])))
        first = last
    return groups


def group_mask(geometry: Geometry, group: Group, dtype: torch.dtype) -> Tensor:
    """`[G*q, C + G*g]` additive mask of one group: 0 where seen, -inf where not."""
    g, asking = geometry.block_size, geometry.asking
    anchor = geometry.anchors[group.first : group.last, None]  # [G, 1]
    blocks = anchor.shape[0]
    t = torch.arange(group.low, group.high, device=anchor.device)
    slot = torch.arange(g - asking, g, device=anchor.device)
    seen = (t < anchor)[:, None].expand(-1, asking, -1)  # [G, q, C]
    if geometry.window is not None:  # within a document packed distance is distance
        seen = seen & (anchor[:, :, None] + slot[:, None] - t < geometry.window)
    within = torch.ones(g, g, dtype=torch.bool, device=anchor.device)
    own = torch.block_diag(*[(within.tril() if geometry.causal else within)[g - asking :]] * blocks)
    both = torch.cat([seen.flatten(0, 1), own], dim=1)
    return torch.zeros(both.shape, dtype=dtype, device=both.device).masked_fill_(~both, -torch.inf)


class _Grouped(torch.autograd.Function):
    """Attention group by group. Backward runs each group's forward again, so that nothing but the inputs is kept, and adds up the
    context's gradients in place (autograd's own gradient of a slice is as large as the whole context)."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, geometry: Geometry, groups: list[Group]) -> Tensor:
        ctx.save_for_backward(q, ck, cv, bk, bv)
        ctx.geometry, ctx.groups = geometry, groups  # type: ignore[attr-defined]
        out = torch.empty_like(q)
        for group in groups:
            inputs = _gather(group, q, ck, cv, bk, bv)
            out[group.first : group.last] = _attend_group(*inputs, group_mask(geometry, group, q.dtype)).view_as(out[group.first : group.last])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # type: ignore[attr-defined]
        geometry, groups = ctx.geometry, ctx.groups  # type: ignore[attr-defined]
        dq, dbk, dbv = torch.empty_like(tensors[0]), torch.empty_like(tensors[3]), torch.empty_like(tensors[4])
        dck, dcv = torch.zeros_like(tensors[1]), torch.zeros_like(tensors[2])
        for group in groups:
            rows, width = slice(group.first, group.last), group.high - group.low
            q, k, v = (x.requires_grad_() for x in _gather(group, *tensors))
            with torch.enable_grad():
                out = _attend_group(q, k, v, group_mask(geometry, group, grad.dtype))
            gq, gk, gv = torch.autograd.grad(out, (q, k, v), grad[rows].flatten(0, 1))
            dq[rows] = gq.view_as(dq[rows])
            for whole, own, g in ((dck, dbk, gk), (dcv, dbv, gv)):
                whole[group.low : group.high] += g[:width]
                own[rows] = g[width:].view_as(own[rows])
        return dq, dck, dcv, dbk, dbv, None, None


def _gather(group: Group, q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[G*q, H, D]`, keys and values `[C + G*g, Hkv, D]` of a group, detached."""
    rows, context = slice(group.first, group.last), slice(group.low, group.high)
    k, v = (torch.cat([c.detach()[context], b.detach()[rows].flatten(0, 1)]) for c, b in ((ck, bk), (cv, bv)))
    return q.detach()[rows].flatten(0, 1), k, v


def _attend_group(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`[G*q, H, D]` queries over `[C + G*g, Hkv, D]` -> `[G*q, H, D]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])[0].transpose(0, 1)


# -- flex: block-sparse kernels on CUDA ---------------------------------------------------------------------------------


def flex_mask(geometry: Geometry) -> Any:
    """The rule above as a BlockMask over `[N*q, T + N*g]`; no dense mask is made on CUDA."""
    g, asking, tokens = geometry.block_size, geometry.asking, geometry.document.shape[0]
    blocks = geometry.anchors.shape[0]
    document, position, anchors = geometry.document, geometry.position, geometry.anchors
    window = geometry.window if geometry.window is not None else tokens + g + 1

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // asking, g - asking + query % asking
        anchor = anchors[block]
        t = key.clamp(max=tokens - 1)
        near = position[anchor] + slot - position[t] < window
        context = (key < tokens) & (t < anchor) & (document[t] == document[anchor]) & near & (position[t] >= geometry.skip)
        other = (key - tokens).clamp(min=0)
        own = (key >= tokens) & (other // g == block)
        return context | (own & (other % g <= slot) if geometry.causal else own)

    return create_block_mask(seen, None, None, blocks * asking, tokens + blocks * g, device=str(anchors.device), _compile=anchors.device.type == "cuda")


def flex(q: Tensor, context: Pair, block: Pair, block_mask: Any) -> Tensor:
    """FlexAttention (no backward on CPU)."""
    n, g, heads, dim = q.shape
    k, v = (torch.cat([c, b.flatten(0, 1)]) for c, b in zip(context, block, strict=True))
    run: Any = _compiled_flex() if q.device.type == "cuda" else flex_attention
    inputs = (x.transpose(0, 1)[None] for x in attended(q.flatten(0, 1), k, v))
    out = run(*inputs, block_mask=block_mask, enable_gqa=heads != k.shape[1])
    return out[0].transpose(0, 1).to(q.dtype).view(n, g, heads, dim)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
