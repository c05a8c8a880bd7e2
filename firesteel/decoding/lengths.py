"""How many drafted tokens to verify: measured costs of a round against measured acceptance."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firesteel.decoding.protocol import Drafter, Target
from firesteel.decoding.sampling import RandomChance, Sampling
from firesteel.decoding.verify import verify_tokens
from firesteel.errors import RecipeError


@dataclass(frozen=True)
class StepCosts:
    """Medians in milliseconds, by the number n of drafted tokens.

    Attributes:
        verify_ms: the target's pass over anchor and n drafts, with the acceptance rule.
        draft_ms: drafting n tokens, and observing n + 1 positions (as many as a round can add).
        plain_ms: the target's pass over one token, with its choice.
    """

    verify_ms: dict[int, float]
    draft_ms: dict[int, float]
    plain_ms: float


@dataclass(frozen=True)
class LengthChoice:
    """`tokens` drafts a round, expected to decode `speedup` times as fast as plain decoding (below 1: slower)."""

    tokens: int
    speedup: float


def measure_costs(target: Target, drafter: Drafter, prompt_ids: Sequence[int], lengths: Sequence[int], *, repeats: int) -> StepCosts:
    """Time single steps after a prompt, greedily, all kinds in turn so that a slow moment of the machine meets them alike.

    Raises:
        RecipeError: no lengths or repeats; lengths that the session cannot hold after this prompt.
    """
    if not lengths or min(lengths) < 1 or repeats < 1:
        raise RecipeError(f"cannot measure the draft lengths {list(lengths)} {repeats} times", mend="give lengths and repeats of 1 or more")
    target.rewind(0)
    drafter.rewind(0)
    first = target.forward(prompt_ids, keep=1)
    drafter.observe(prompt_ids, first.aux)
    anchor, start, greedy, chance = int(first.logits[-1].argmax()), target.length, Sampling(), RandomChance(None)
    plain: list[float] = []
    verify: dict[int, list[float]] = {n: [] for n in lengths}
    draft: dict[int, list[float]] = {n: [] for n in lengths}
    # The first turn warms kernels and caches up and is not counted.
    for turn in range(repeats + 1):
        plain.append(_milliseconds(lambda: int(target.forward([anchor]).logits[0].argmax())))
        target.rewind(start)
        for n in lengths:
            clock = time.perf_counter()
            tokens = [int(t) for t in drafter.draft(anchor, n, temperature=0.0, generator=None).tokens]
            drafted = time.perf_counter()
            step = target.forward([anchor, *tokens])
            verify_tokens(tokens, None, step.logits, greedy, chance)
            verified = time.perf_counter()
            drafter.observe([anchor, *tokens], step.aux)
            draft[n].append(1e3 * (drafted - clock + time.perf_counter() - verified))
            verify[n].append(1e3 * (verified - drafted))
            target.rewind(start)
            drafter.rewind(start)
        if turn == 0:
            plain.clear()
            for times in (*verify.values(), *draft.values()):
                times.clear()
    return StepCosts({n: statistics.median(t) for n, t in verify.items()}, {n: statistics.median(t) for n, t in draft.items()}, statistics.median(plain))


def best_length(costs: StepCosts, acceptance: Sequence[float]) -> LengthChoice:
    """The measured length with the most tokens per millisecond.

    A round of n drafts writes `1 + sum_{k <= n} P(the first k drafts stand)` tokens on average.

    Args:
        costs: what rounds cost.
        acceptance: unconditional probabilities that the first k drafts all stand, k = 1, 2, ...

    Raises:
        RecipeError: no measured length has acceptance known.
    """
    choices = [
        LengthChoice(n, (1 + sum(acceptance[:n])) * costs.plain_ms / (costs.verify_ms[n] + costs.draft_ms[n]))
        for n in sorted(costs.verify_ms)
        if n <= len(acceptance) and n in costs.draft_ms
    ]
    if not choices:
        raise RecipeError(
            f"acceptance is known for {len(acceptance)} drafts, costs for {sorted(costs.verify_ms)}: no length has both",
            mend="measure lengths that the drafter can draft",
        )
    # Of equals the shortest, which wastes the least where the target serves others too.
    return max(choices, key=lambda choice: (choice.speedup, -choice.tokens))


def _milliseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)
