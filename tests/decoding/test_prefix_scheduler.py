"""DSpark's prefix scheduler: the published counterexample, hand-made cases, and losslessness over several requests by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from decoding_toys import Enumerated, Table, ToyTarget, all_outcomes, distance, random_table, texts

from firesteel.decoding.sampling import Sampling
from firesteel.decoding.scheduler import admit_early_stop, admit_top, best_capacity, worth_drafting
from firesteel.decoding.verify import Rejection, verify_tokens
from firesteel.errors import VerificationError


def sps(*rates: float) -> Callable[[np.ndarray], np.ndarray]:
    """Steps per second of 1, 2, ... tokens; asking beyond the table is an error."""
    return lambda tokens: np.array(rates)[np.asarray(tokens) - 1]


@pytest.mark.lossless
@pytest.mark.parametrize("second", [0.0, 0.5, 0.9, 1.0])
def test_the_counterexample_stops_before_the_first_draft_whatever_the_second_is(second):
    # theta_0 = 1, theta_1 = 1.8 * 0.5 = 0.9. With c_2 = 0.9, theta_2 = 2.52 * 0.45 = 1.134 would tempt a global search.
    assert admit_early_stop([[0.8, 0.8 * second]], sps(1.0, 0.5, 0.45)) == [0]
    assert best_capacity([[0.8, 0.8 * second]], sps(1.0, 0.5, 0.45)) == (3 if second >= 0.9 else 1)


def test_by_hand():
    survival = [[0.9, 0.5, 0.2], [0.6, 0.55, 0.5], []]
    # Order: 0.9, 0.6, 0.55, 0.5 (request 0, its 2nd), 0.5 (request 1, its 3rd), 0.2.
    flat = sps(*[1.0] * 9)
    assert admit_early_stop(survival, flat) == [3, 3, 0]
    # tau is 3, 3.9, 4.5, 5.05, 5.55, 6.05, 6.25; theta falls with the fourth.
    assert admit_early_stop(survival, sps(9, 9, 1, 0.9, 0.85, 0.8, 0.7, 0.69, 0.69)) == [1, 2, 0]
    assert admit_top(survival, 3) == [0, 0, 0]
    assert admit_top(survival, 7) == [2, 2, 0]  # of the two at 0.5 the earlier draft
    assert admit_top(survival, 99) == [3, 3, 0]
    assert admit_top(survival, 1) == [0, 0, 0]
    assert admit_early_stop([], flat) == []
    assert admit_early_stop([[]], flat) == [0]


def test_equal_rates_stop():
    """theta must rise: a draft that adds nothing is not verified."""
    assert admit_early_stop([[0.5]], sps(3.0, 2.0)) == [0]
    assert admit_early_stop([[0.0, 0.0]], sps(1.0, 1.0, 1.0)) == [0]


def one_by_one(survival: Sequence[Sequence[float]], rate: Callable[[np.ndarray], np.ndarray]) -> list[int]:
    """Algorithm 1 as it is written, looking at no draft before the ones ahead of it are admitted."""
    lengths, tau, best = [0] * len(survival), float(len(survival)), len(survival) * float(rate(np.array([len(survival)]))[0])
    while True:
        heads = [(-survival[r][n], n, r) for r, n in enumerate(lengths) if n < len(survival[r])]
        if not heads:
            return lengths
        fall, _, r = min(heads)
        tau -= fall
        theta = tau * float(rate(np.array([len(survival) + sum(lengths) + 1]))[0])
        if theta <= best:
            return lengths
        best = theta
        lengths[r] += 1


def test_sorting_all_drafts_is_the_same_as_revealing_them_one_by_one():
    generator = np.random.default_rng(0)
    stopped = set()
    for _ in range(300):
        requests = int(generator.integers(1, 5))
        # Rounded, so that there are ties.
        survival = [np.cumprod(generator.choice([0.25, 0.5, 0.75, 1.0], int(generator.integers(0, 5)))).tolist() for _ in range(requests)]
        seconds = np.cumsum(generator.random(requests + 25) * generator.choice([0.05, 0.3, 1.0])) + 1
        rate = lambda tokens, s=seconds: 1 / s[np.asarray(tokens)]  # noqa: E731
        found = admit_early_stop(survival, rate)
        assert found == one_by_one(survival, rate)
        stopped.add(sum(found))
    assert len(stopped) > 5


def test_a_draft_that_comes_later_never_changes_what_was_admitted_before_it():
    """Admission of a request's first drafts is the same whatever the confidences behind them."""
    generator = np.random.default_rng(1)
    for _ in range(100):
        base, rates = generator.random((3, 4)), 1 / (1 + np.arange(20) * generator.random() * 0.5)
        found = admit_early_stop(np.cumprod(base, 1).tolist(), sps(*rates))
        for r in range(3):
            changed = base.copy()
            changed[r, found[r] + 1 :] = generator.random(max(0, 3 - found[r]))
            assert admit_early_stop(np.cumprod(changed, 1).tolist(), sps(*rates)) == found


@pytest.mark.parametrize("bad", [[[0.5, 0.6]], [[1.1]], [[-0.1]], [[0.5], [0.2, 0.3]], [[float("nan")]]])
def test_what_is_no_survival_is_refused(bad):
    with pytest.raises(VerificationError, match="never rise"):
        admit_early_stop(bad, sps(*[1.0] * 9))


def test_drafting_is_planned_for_those_that_pay_for_it():
    def seconds(tokens, drafting):
        return 1.0 + 0.005 * np.asarray(tokens) + 0.15 * np.minimum(drafting, 1) + 0.002 * np.asarray(drafting)

    assert worth_drafting([[0.9, 0.8], [0.01, 0.0]], seconds, margin=0.0) == [2, 0]
    assert worth_drafting([[0.1], [0.1]], seconds, margin=0.0) == [0, 0]
    # The drafter's fixed cost is paid by the step: one of eight requests cannot bear it, all together can.
    assert worth_drafting([[0.25], *[[0.0]] * 7], seconds, margin=0.0) == [0] * 8
    assert worth_drafting([[0.25]] * 8, seconds, margin=0.0) == [1] * 8
    assert worth_drafting([[0.25]] * 8, seconds, margin=0.2) == [0] * 8
    assert worth_drafting([[], []], seconds, margin=0.0) == [0, 0]


Rule = Callable[[list[list[float]]], list[int]]
Confidence = Callable[[int, tuple[int, ...]], float]
PROMPTS = ((0, 1), (1, 0))


def served(rule: Rule, rejection: Rejection, confidence: Confidence, targets: Sequence[Table], drafters: Sequence[Table], drafts: int = 2) -> float:
    """Distance of the *joint* distribution of all requests' texts, one scheduled round each, from independent target texts."""

    def program(chance: Enumerated) -> tuple[tuple[int, ...], ...]:
        made = []
        for r, table in enumerate(drafters):
            context, tokens, rows, survival = PROMPTS[r], [], [], [1.0]
            for _ in range(drafts):
                survival.append(survival[-1] * confidence(r, context))
                rows.append(table(context))
                tokens.append(chance.pick(rows[-1]))
                context = (*context, tokens[-1])
            made.append((tokens, torch.stack(rows), survival[1:]))
        texts_made = []
        for r, length in enumerate(rule([m[2] for m in made])):
            tokens, rows, _ = made[r]
            logits = ToyTarget(targets[r], tokens=list(PROMPTS[r][:-1])).forward([PROMPTS[r][-1], *tokens[:length]]).logits
            verdict = verify_tokens(tokens[:length], rows[:length], logits, Sampling(1.0), chance, rejection)
            texts_made.append((*tokens[: verdict.accepted], verdict.next_token))
        return tuple(texts_made)

    own = [texts(targets[r], PROMPTS[r], drafts + 1, set()) for r in range(len(targets))]
    wanted = {pair: np.prod([own[r][t] for r, t in enumerate(pair)]) for pair in itertools.product(*own)}
    found: dict[tuple[tuple[int, ...], ...], float] = {}
    for pair, probability in all_outcomes(program).items():
        ends = [texts(targets[r], (*PROMPTS[r], *t), drafts + 1 - len(t), set()) for r, t in enumerate(pair)]
        for rest in itertools.product(*ends):
            key = tuple((*t, *tail) for t, tail in zip(pair, rest, strict=True))
            found[key] = found.get(key, 0.0) + probability * np.prod([e[tail] for e, tail in zip(ends, rest, strict=True)])
    return distance(found, wanted)


def honest(request: int, before: tuple[int, ...]) -> float:
    """A confidence made from the tokens before the one it speaks of."""
    return (0.95, 0.4, 0.75, 0.6)[(sum(before) + len(before) + request) % 4]


# Two requests and their drafts make 2 to 6 tokens. Where the stop falls depends on the tokens drafted, and a global search would
# sometimes pass over a fall of theta that stops Algorithm 1.
CURVE = sps(1.0, 1.0, 0.80, 0.655, 0.58, 0.52)


def tables(seed: int, vocabulary: int = 2) -> tuple[list[Table], list[Table]]:
    return [random_table(vocabulary, seed + r) for r in (0, 10)], [random_table(vocabulary, seed + r) for r in (20, 30)]


def globally(survival: list[list[float]]) -> list[int]:
    """The variant that is not allowed: the best of all lengths, for the drafts at hand."""
    return admit_top(survival, best_capacity(survival, CURVE))


@pytest.mark.lossless
@pytest.mark.parametrize("rejection", ["token", "block"])
@pytest.mark.parametrize("seed", [0, 1])
def test_early_stop_over_two_requests_is_lossless(rejection, seed):
    lengths = set()

    def rule(survival: list[list[float]]) -> list[int]:
        lengths.add(tuple(admit_early_stop(survival, CURVE)))
        return admit_early_stop(survival, CURVE)

    assert served(rule, rejection, honest, *tables(seed)) < 1e-9
    assert len(lengths) > 2, "lengths that never differ prove little"


@pytest.mark.lossless
@pytest.mark.parametrize("rejection", ["token", "block"])
@pytest.mark.parametrize("capacity", [3, 4, 5])
def test_filling_a_fixed_capacity_over_two_requests_is_lossless(rejection, capacity):
    assert served(lambda survival: admit_top(survival, capacity), rejection, honest, *tables(2)) < 1e-9


@pytest.mark.lossless
@pytest.mark.parametrize("rejection", ["token", "block"])
def test_a_global_search_over_the_drafts_at_hand_is_biased(rejection):
    assert max(served(globally, rejection, honest, *tables(seed)) for seed in range(3)) > 1e-3


@pytest.mark.lossless
def test_the_published_bias_of_a_global_search():
    """p_t = (0.7, 0.3), p_d = (0.5, 0.5): the first token comes out as (0.85, 0.15) where c_2 is 0.9 after token 0 and 0 after token 1."""
    target, draft, curve = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64), sps(1.0, 0.5, 0.45)

    def first(rule: Rule) -> list[float]:
        def program(chance: Enumerated) -> int:
            tokens = [chance.pick(draft), chance.pick(draft)]
            length = rule([[0.8, 0.8 * (0.9 if tokens[0] == 0 else 0.0)]])[0]
            logits = torch.stack([target.log()] * (length + 1))
            verdict = verify_tokens(tokens[:length], torch.stack([draft] * 2)[:length], logits, Sampling(1.0), chance)
            return [*tokens[: verdict.accepted], verdict.next_token][0]

        found = all_outcomes(program)
        return [found[0], found[1]]

    assert first(lambda survival: admit_top(survival, best_capacity(survival, curve))) == pytest.approx([0.85, 0.15])
    assert first(lambda survival: admit_early_stop(survival, curve)) == pytest.approx([0.7, 0.3])


@pytest.mark.lossless
def test_confidences_that_see_their_own_token_are_caught():
    """The contract that everything rests on: c_j must not be made from token j."""
    made: list[list[list[float]]] = []

    def rule(survival: list[list[float]]) -> list[int]:
        made.append(survival)
        return admit_early_stop(survival, CURVE)

    # Shifted by one: the second confidence stands where the first should, and is made from the first token.
    assert served(lambda survival: rule([[s[1], s[1]] for s in survival]), "token", honest, *tables(0)) > 1e-3
    assert made
