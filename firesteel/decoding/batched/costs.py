"""What steps of the batched engine cost on this machine: the profile that its schedulers read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.protocol import BatchTarget
from firesteel.decoding.profile import Profile, measure_curve
from firesteel.drafters.rows import BatchDrafter, Want
from firesteel.errors import ResourceError
from firesteel.kernels.spans import Span

CONTEXT = 128
"""Positions before those that are timed."""


def step_sizes(most: int) -> list[int]:
    """Tokens of a step to be timed, up to `most`: close together where a step is short, and where machines have their stairs."""
    sizes = [n for n in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128, 192, 256, 384, 512) if n < most]
    return [*sizes, most]


def measure_batch_profile(
    target: BatchTarget, drafter: BatchDrafter | None, pool: BlockPool, *, requests: int, draft_tokens: int, vocab_size: int, repeats: int
) -> Profile:
    """Time steps of 1 to `requests * (draft_tokens + 1)` tokens over up to `requests` sequences, and drafts for 1 to `requests` of them, greedily.

    Raises:
        ResourceError: the cache is too small for that.
    """
    round_ = draft_tokens + 1
    context = max(1, min(CONTEXT, target.max_length - round_ - 1))
    scratch = 0 if drafter is None else drafter.scratch
    tables: list[list[int]] = [[] for _ in range(requests)]
    prompt = torch.randint(vocab_size, (context,), generator=torch.Generator().manual_seed(0))
    try:
        if not all(pool.grow(table, context + round_ + scratch) for table in tables):
            raise ResourceError(f"the cache does not hold {requests} requests of {context + round_ + scratch} positions", mend="raise serve.cache_gb")
        for i, table in enumerate(tables):
            spans = [Span(-1 - i, table, 0, context)]
            _, aux = target.forward(prompt, spans, [1])
            if drafter is not None:
                drafter.observe(prompt, spans, aux)

        def verify(tokens: int) -> None:
            spans = _spread(tables, context, tokens)
            logits, _ = target.forward(torch.zeros(tokens, dtype=torch.long), spans, [s.count for s in spans])
            logits.argmax(-1).tolist()

        step = measure_curve(verify, step_sizes(requests * round_), repeats=repeats)
        if drafter is None:
            return Profile(step)
        seen = torch.zeros(requests * round_, aux.shape[1], dtype=aux.dtype)

        # What the schedulers ask for is seldom all that there can be.
        usual = (draft_tokens + 1) // 2

        def verify_usual(count: int) -> None:
            # A draft follows a step of the target: that has left its threads and its share of the machine's caches to it.
            rows = count * (usual + 1)
            target.forward(torch.zeros(rows, dtype=torch.long), _spread(tables[:count], context, rows), [1] * count)

        def propose(count: int) -> None:
            spans = [Span(-1 - i, table, context, 0) for i, table in enumerate(tables[:count])]
            drafter.draft([Want(span, 0, usual, 0.0, None) for span in spans])
            # Of a round, as many positions are observed as it can add.
            rows = count * (usual + 1)
            drafter.observe(torch.zeros(rows, dtype=torch.long), _spread(tables[:count], context, rows), seen[:rows])
            if not drafter.shares_prefix:  # sessions go back to where they were
                for i in range(count):
                    drafter.forget(-1 - i)
                    drafter.observe(prompt, [Span(-1 - i, tables[i], 0, context)], aux)

        return Profile(step, measure_curve(propose, step_sizes(requests), repeats=repeats, before=verify_usual))
    finally:
        for i, table in enumerate(tables):
            pool.release(table)
            target.forget(-1 - i)
            if drafter is not None:
                drafter.forget(-1 - i)


def _spread(tables: Sequence[Sequence[int]], start: int, tokens: int) -> list[Span]:
    """That many tokens, dealt out to as many sequences as there are."""
    counts = [len(range(i, tokens, len(tables))) for i in range(min(tokens, len(tables)))]
    return [Span(-1 - i, table, start, n) for i, (table, n) in enumerate(zip(tables, counts, strict=False))]
