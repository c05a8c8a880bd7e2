"""The block drafters for many sequences draft what their session drafts for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_cases import TINY, VARIANTS, make_drafter, make_tables
from dflash2_cases import TINY2
from torch import Tensor

from firesteel.drafters.config import DraftConfig
from firesteel.drafters.paged import PagedBlockDrafter, runs_paged
from firesteel.drafters.registry import get_spec
from firesteel.drafters.rows import Want
from firesteel.drafters.session import BlockSession
from firesteel.kernels.spans import Span

LENGTHS, BLOCKS = [3, 17, 40, 16, 1], 40


def both(config: DraftConfig) -> tuple[PagedBlockDrafter, BlockSession]:
    drafter, (embed, head, ids) = make_drafter(config), make_tables(config)
    tables = {"draft_to_target": ids if config.reduced_vocab else None, "max_length": 60}
    temperatures = [0.5 + 0.3 * k for k in range(config.num_drafts)] if config.confidence_head else None
    paged = PagedBlockDrafter(drafter, embed, head, blocks=BLOCKS, confidence_temperatures=temperatures, **tables)  # type: ignore[arg-type]
    return paged, BlockSession(drafter, embed, head, confidence_temperatures=temperatures, **tables)  # type: ignore[arg-type]


def states(config: DraftConfig, number: int) -> Tensor:
    width = len(config.layer_ids) * config.target_hidden_size
    return torch.randn(LENGTHS[number], width, generator=torch.Generator().manual_seed(number))


def show(paged: PagedBlockDrafter, config: DraftConfig) -> list[list[int]]:
    """Let it observe all sequences, some of them in two pieces; their blocks."""
    order = iter(torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)).tolist())
    tables = [[next(order) for _ in range(-(-(n + config.block_size) // 16))] for n in LENGTHS]
    halves = [n // 2 for n in LENGTHS]
    for part in (0, 1):
        spans = [Span(i, t, 0 if part == 0 else h, h if part == 0 else n - h) for i, (t, n, h) in enumerate(zip(tables, LENGTHS, halves, strict=True))]
        spans = [s for s in spans if s.count]
        aux = torch.cat([states(config, s.key)[s.start : s.end] for s in spans])
        paged.observe(torch.zeros(len(aux), dtype=torch.long), spans, aux)
    return tables


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_equal_the_sessions(name: str, temperature: float) -> None:
    config = VARIANTS[name]
    paged, session = both(config)
    assert runs_paged(make_drafter(config))
    tables = show(paged, config)
    for chosen in ([0, 1, 2, 3, 4], [2], [4, 1]):  # together, alone, and few
        counts = [1 + (i + len(chosen)) % config.num_drafts for i in chosen]
        wants = [Want(Span(i, tables[i], LENGTHS[i], 0), 7 + i, n, temperature, torch.Generator().manual_seed(i)) for i, n in zip(chosen, counts, strict=True)]
        for want, mine in zip(wants, paged.draft(wants), strict=True):
            i = want.span.key
            session.rewind(0)
            session.observe((), states(config, i))
            own = session.draft(want.anchor, want.count, temperature=temperature, generator=torch.Generator().manual_seed(i))
            assert mine.tokens == own.tokens
            if own.confidences is not None:
                torch.testing.assert_close(torch.tensor(mine.confidences), torch.tensor(own.confidences), rtol=1e-3, atol=1e-5)
            assert (mine.probs is None) == (own.probs is None)
            if mine.probs is not None and own.probs is not None:
                torch.testing.assert_close(mine.probs, session.expand(own.probs), rtol=1e-3, atol=1e-5)


def test_a_draft_leaves_the_context_as_it_was() -> None:
    paged, _ = both(TINY)
    tables = show(paged, TINY)
    want = [Want(Span(i, tables[i], LENGTHS[i], 0), 3, 4, 0.0, None) for i in range(5)]
    assert [d.tokens for d in paged.draft(want)] == [d.tokens for d in paged.draft(want)]


def test_what_has_layers_of_its_own_goes_sequence_by_sequence() -> None:
    assert not runs_paged(get_spec("dflash2").build(TINY2))
    assert not runs_paged(make_drafter(replace(TINY), dtype=torch.float64))
