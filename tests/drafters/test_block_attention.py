"""The three attention paths agree, and nothing leaks into a block that serving would not have."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from block_cases import MIXED, TINY, VARIANTS, make_batch, make_drafter, make_tables
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from firesteel.batches.batch import Batch
from firesteel.drafters import attention
from firesteel.drafters.attention import dense_mask, make_attend, make_geometry
from firesteel.drafters.block import TrainingRows
from firesteel.errors import RecipeError

LENGTHS = [9, 1, 30, 14]
ANCHORS = [0, 1, 2, 7, 8, 9, 10, 11, 15, 20, 22, 38, 39, 41, 52, 53]


def scalar(rows: TrainingRows, dtype: torch.dtype) -> Tensor:
    """A loss that every parameter has a share in, with different weights for all slots."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.stack([r @ w.T for r, w in rows.pieces]).sum(0)
    total = (logits * torch.randn(logits.shape, generator=generator).to(dtype)).sum() + (
        rows.z * torch.randn(rows.z.shape, generator=generator).to(dtype)
    ).sum()
    return total if rows.confidence_logits is None else total + rows.confidence_logits.square().sum()


@pytest.mark.parametrize("name", VARIANTS)
def test_fast_equals_dense_forward_and_gradients(name: str) -> None:
    config, dtype = VARIANTS[name], torch.float64
    drafter, (embed, head, _) = make_drafter(config, dtype=dtype), make_tables(config, dtype=dtype)
    batch = make_batch(config, LENGTHS, ANCHORS, dtype=dtype)
    found = []
    for path in ("dense", "fast"):
        drafter.zero_grad()
        rows = drafter.training_rows(batch, embed, head, attention=path)
        scalar(rows, dtype).backward()
        found.append((rows.z.detach(), {n: p.grad.clone() for n, p in drafter.named_parameters()}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-10, atol=1e-10)
    assert all(float(g.abs().max()) > 0 for g in found[0][1].values())
    for key, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], gradient, rtol=1e-9, atol=1e-9, msg=key)


def test_fast_equals_dense_in_float32() -> None:
    drafter, (embed, head, _) = make_drafter(MIXED), make_tables(MIXED)
    batch = make_batch(MIXED, LENGTHS, ANCHORS)
    dense, fast = (drafter.training_rows(batch, embed, head, attention=p).z for p in ("dense", "auto"))
    torch.testing.assert_close(fast, dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 8, 10_000])
def test_groups_of_any_size_agree(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_GROUP_ROWS", rows)
    config = VARIANTS["mixed-causal"]
    drafter, (embed, head, _) = make_drafter(config), make_tables(config)
    batch = make_batch(config, LENGTHS, ANCHORS)
    dense, fast = (drafter.training_rows(batch, embed, head, attention=p).z for p in ("dense", "fast"))
    torch.testing.assert_close(fast, dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dspark", "mixed-causal", "one-kv-head", "fill-in"])
def test_flex_equals_dense(name: str) -> None:
    config, dtype = VARIANTS[name], torch.float64
    drafter, (embed, head, _) = make_drafter(config, dtype=dtype), make_tables(config, dtype=dtype)
    batch = make_batch(config, LENGTHS, ANCHORS, dtype=dtype)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # it says that it is slow uncompiled
        dense, flex = (drafter.training_rows(batch, embed, head, attention=p).z for p in ("dense", "flex"))
    torch.testing.assert_close(flex, dense, rtol=1e-10, atol=1e-10)


def test_mask_written_out() -> None:
    """Two documents of 3 and 4 tokens; anchors at the first's third token and the second's fourth; blocks of 2; window 3, causal."""
    config = replace(TINY, block_size=2)
    batch = make_batch(config, [3, 4], [2, 6])
    geometry = make_geometry(batch, 3, causal=True)
    expected = [
        "1100000 1000",  # position 2 sees positions above -1
        "0100000 1100",  # position 3 sees positions above 0
        "0000110 0010",
        "0000010 0011",
    ]
    mask = dense_mask(geometry)
    assert ["".join(str(int(v)) for v in row[:7]) + " " + "".join(str(int(v)) for v in row[7:]) for row in mask] == expected


def test_unknown_path_is_refused() -> None:
    with pytest.raises(RecipeError, match="attention path"):
        make_attend("quick", make_geometry(make_batch(TINY, [5], [2]), None, causal=False))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dspark", "dflash", "mixed-causal"])
def test_no_leak_from_the_anchor_on(name: str) -> None:
    """States at or after the anchor, later tokens and other documents do not change a block's states; the anchor's token does."""
    config = VARIANTS[name]
    drafter, (embed, _, _) = make_drafter(config), make_tables(config)
    batch = make_batch(config, [8, 20, 6], [8 + 9])
    before = drafter.states(batch, embed)
    changed = scrambled(batch, keep=slice(8, 17))
    changed.token_ids[17] = batch.token_ids[17]
    torch.testing.assert_close(drafter.states(changed, embed), before, rtol=0, atol=0)
    changed.token_ids[17] = (batch.token_ids[17] + 1) % 49
    assert not torch.allclose(drafter.states(changed, embed), before, atol=1e-3)


def test_every_visible_position_matters() -> None:
    config = replace(MIXED, layer_types=("sliding_attention",) * 2)
    drafter, (embed, _, _) = make_drafter(config), make_tables(config)
    batch = make_batch(config, [20], [12])
    before = drafter.states(batch, embed)
    seen = []
    for t in range(20):
        other = replace(batch, context=batch.context.clone())
        other.context[t] += 1.0
        if not torch.equal(drafter.states(other, embed), before):
            seen.append(t)
    assert seen == [7, 8, 9, 10, 11]  # window 6 of the first query at 12: positions > 6, before the anchor


def test_blocks_do_not_see_each_other() -> None:
    drafter, (embed, _, _) = make_drafter(TINY), make_tables(TINY)
    together = drafter.states(make_batch(TINY, [20, 9], [3, 4, 5, 12, 22]), embed)
    for row, anchor in enumerate([3, 4, 5, 12, 22]):
        alone = drafter.states(make_batch(TINY, [20, 9], [anchor]), embed)
        torch.testing.assert_close(together[row], alone[0], rtol=1e-4, atol=1e-5)


def test_a_batch_without_blocks() -> None:
    drafter, (embed, head, _) = make_drafter(TINY), make_tables(TINY)
    batch = make_batch(TINY, [5], [2])
    empty = replace(batch, anchors=batch.anchors[:0], slots=batch.slots[:0])
    assert drafter.training_rows(empty, embed, head).z.shape == (0, 4, 24)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("window", [None, 40])
def test_fast_never_has_slots_times_all_keys_at_once(window: int | None) -> None:
    """Of no size is a mask or scores of all blocks, forward or backward: the largest is that of a group, whatever the number of blocks."""
    tokens, blocks, g, heads, dim = 640, 512, 4, 2, 8
    config = replace(TINY, block_size=g)
    geometry = make_geometry(make_batch(config, [320, 320], [i + 32 + 64 * (i >= 256) for i in range(blocks)]), window, causal=False)
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, requires_grad=True)

    inputs = leaf(blocks, g, heads, dim), (leaf(tokens, 1, dim), leaf(tokens, 1, dim)), (leaf(blocks, g, 1, dim), leaf(blocks, g, 1, dim))
    most = {}
    for path in ("fast", "dense"):
        with Largest() as seen:
            attend = make_attend(path, geometry)  # type: ignore[arg-type]
            attend(*inputs).sum().backward()
        most[path] = seen.numel
    whole = blocks * g * (tokens + blocks * g)
    rows = attention._GROUP_ROWS
    assert most["fast"] <= heads * rows * (min(320, window + rows if window else 320) + rows) < whole / 10
    assert most["dense"] >= whole  # the guard would have seen it


def scrambled(batch: Batch, keep: slice) -> Batch:
    """Other tokens and states everywhere but in `keep`."""
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, 49, batch.token_ids.shape, generator=generator)
    context = torch.randn(batch.context.shape, generator=generator) * 3
    tokens[keep], context[keep] = batch.token_ids[keep], batch.context[keep]
    return replace(batch, token_ids=tokens, context=context)
