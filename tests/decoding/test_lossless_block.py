"""Block verification by enumeration: the target's distribution in every combination, and never fewer tokens than token-wise verification."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest
import torch
from decoding_toys import COMBINATIONS, Enumerated, Table, ToyDrafter, ToyTarget, all_outcomes, by_hand, distance, edge_table, random_table, texts

from firesteel.decoding import verify
from firesteel.decoding.decode import decode_speculative
from firesteel.decoding.policies import StaticThreshold
from firesteel.decoding.sampling import Sampling
from firesteel.decoding.verify import Rejection, accept_probability, block_accept, block_weights, residual, verify_tokens
from firesteel.errors import RecipeError, VerificationError

RULES: list[Rejection] = ["token", "block"]
# Kind of drafter: its support, and whether it is deterministic.
DRAFTERS: dict[str, tuple[tuple[int, ...] | None, bool]] = {"whole": (None, False), "reduced": ((0, 2), False), "one-hot": (None, True)}


def one_round(rule: Rejection, sampling: Sampling, *, target: Table | None = None, drafts=2, seed=0, support=None, deterministic=False) -> float:
    """Distance of one round's outcome, completed by the target alone, from the target's own texts."""
    target = target or random_table(3, seed)
    draft = random_table(len(target((0,))), seed + 50, support=support)
    true = by_hand(target, sampling)

    def program(chance: Enumerated) -> tuple[int, ...]:
        proposal = ToyDrafter(draft, chance, deterministic=deterministic, seen=[0]).draft(1, drafts, temperature=1.0, generator=None)
        logits = ToyTarget(target, tokens=[0]).forward([1, *proposal.tokens]).logits
        verdict = verify_tokens(proposal.tokens, proposal.probs, logits, sampling, chance, rule)
        return (*proposal.tokens[: verdict.accepted], verdict.next_token)

    found: dict[tuple[int, ...], float] = {}
    for text, probability in all_outcomes(program).items():
        for rest, p in texts(true, (0, 1, *text), drafts + 1 - len(text), set()).items():
            found[*text, *rest] = found.get((*text, *rest), 0.0) + probability * p
    return distance(found, texts(true, (0, 1), drafts + 1, set()))


def whole_text(rule: Rejection, seed: int, *, drafts=2, length=4, eos: set[int] | None = None, threshold=None, support=None, deterministic=False) -> float:
    """Distance between the distribution of `decode_speculative`'s texts and the target's own."""
    target, draft = random_table(3, seed), random_table(3, seed + 77, support=support)

    def program(chance: Enumerated) -> tuple[int, ...]:
        return tuple(
            decode_speculative(
                ToyTarget(target),
                ToyDrafter(draft, chance, lambda context, _: (0.9, 0.5, 0.7)[sum(context) % 3], deterministic),
                (0, 1),
                draft_tokens=drafts,
                max_new_tokens=length,
                eos_ids=eos or set(),
                temperature=1.0,
                rejection=rule,
                lengths=None if threshold is None else StaticThreshold(threshold),
                chance=chance,
            ).tokens
        )

    return distance(all_outcomes(program), texts(target, (0, 1), length, eos or set()))


def without(sampling: Sampling) -> list[Sampling]:
    """The same with one of its settings left out, for each that it has."""
    neutral = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}
    return [replace(sampling, **{name: value}) for name, value in neutral.items() if getattr(sampling, name) != value]


@pytest.mark.parametrize("sampling", COMBINATIONS, ids=str)
def test_every_setting_of_every_combination_makes_a_difference(sampling):
    """Or the proofs below would prove less than they seem to."""
    target = edge_table(sampling.temperature)
    own = texts(by_hand(target, sampling), (0, 1), 3, set())
    for less in without(sampling):
        assert distance(own, texts(by_hand(target, less), (0, 1), 3, set())) > 1e-3, less


@pytest.mark.lossless
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("sampling", COMBINATIONS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_keeps_the_distribution(rule, sampling, kind):
    support, deterministic = DRAFTERS[kind]
    assert one_round(rule, sampling, target=edge_table(sampling.temperature), support=support, deterministic=deterministic) < 1e-9
    assert one_round(rule, sampling, support=support, deterministic=deterministic) < 1e-9


@pytest.mark.lossless
@pytest.mark.parametrize("sampling", COMBINATIONS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_texts_of_every_combination_keep_the_distribution(rule, sampling):
    """The whole of `decode_speculative`, so that settings must also arrive where they belong."""
    target, draft = edge_table(sampling.temperature), random_table(4, 77)

    def program(chance: Enumerated) -> tuple[int, ...]:
        how = {"draft_tokens": 2, "max_new_tokens": 3, "eos_ids": (), "rejection": rule, "chance": chance}
        return tuple(decode_speculative(ToyTarget(target), ToyDrafter(draft, chance), (0, 1), **how, **asdict(sampling)).tokens)

    assert distance(all_outcomes(program), texts(by_hand(target, sampling), (0, 1), 3, set())) < 1e-9


@pytest.mark.lossless
@pytest.mark.parametrize("seed", [1, 2])
def test_a_round_of_three_keeps_the_distribution(seed):
    assert one_round("block", Sampling(1.0), drafts=3, seed=seed) < 1e-9


@pytest.mark.lossless
@pytest.mark.parametrize(
    "case",
    [{}, {"eos": {1}}, {"support": (0, 2)}, {"deterministic": True, "drafts": 3}, {"threshold": 0.6}, {"threshold": 0.3, "eos": {2}, "drafts": 3, "length": 3}],
    ids=str,
)
def test_texts_keep_the_distribution(case):
    assert whole_text("block", 5, **case) < 1e-9


@pytest.mark.lossless
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_the_target_is_always_accepted(temperature):
    table = random_table(3, 9)

    def program(chance: Enumerated) -> int:
        proposal = ToyDrafter(table, chance, seen=[0], deterministic=temperature == 0).draft(1, 3, temperature=1.0, generator=None)
        logits = ToyTarget(table, tokens=[0]).forward([1, *proposal.tokens]).logits
        return verify_tokens(proposal.tokens, proposal.probs, logits, Sampling(temperature), chance, "block").accepted

    assert all_outcomes(program)[3] == pytest.approx(1, abs=1e-12)


def test_greedy_is_the_same_under_both_rules():
    for seed in range(20):
        target, drafts = random_table(4, seed), ToyDrafter(random_table(4, seed + 50), Enumerated([]), seen=[0]).draft(1, 3, temperature=1.0, generator=None)
        logits = ToyTarget(target, tokens=[0]).forward([1, *drafts.tokens]).logits
        assert len({verify_tokens(drafts.tokens, drafts.probs, logits, Sampling(), Enumerated([]), rule) for rule in RULES}) == 1


@pytest.mark.lossless
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("block_weights", lambda ratios: [1.0, *itertools.accumulate((min(1.0, r) for r in ratios), lambda a, b: a * b)]),  # token-wise products
        ("block_weights", lambda ratios: [1.0, *(min(1.0, r) for r in ratios)]),
        ("block_accept", lambda weight, surplus: weight),
        ("block_accept", lambda weight, surplus: 0.9 * block_accept(weight, surplus)),
        ("residual", lambda target, draft, weight: residual(target, draft)),
        ("residual", lambda target, draft, weight: target),
    ],
)
def test_wrong_rules_are_caught(monkeypatch, name, wrong):
    assert one_round("block", Sampling(1.0), seed=3) < 1e-9
    monkeypatch.setattr(verify, name, wrong)
    assert one_round("block", Sampling(1.0), seed=3) > 1e-3


def accepted_by_code(rule: Rejection, target: Table, draft: Table, drafts: int, *, deterministic: bool, sampling: Sampling) -> float:
    def program(chance: Enumerated) -> int:
        proposal = ToyDrafter(draft, chance, deterministic=deterministic, seen=[0]).draft(1, drafts, temperature=1.0, generator=None)
        logits = ToyTarget(target, tokens=[0]).forward([1, *proposal.tokens]).logits
        return verify_tokens(proposal.tokens, proposal.probs, logits, sampling, chance, rule).accepted

    return sum(n * p for n, p in all_outcomes(program).items())


def accepted_by_formula(target: Table, draft: Table, drafts: int) -> tuple[float, float]:
    """Expected accepted drafts of both rules, summed over all drafts: products of min(1, ratio), and block weights."""
    by_token = by_block = 0.0
    for text in itertools.product(range(len(target((0, 1)))), repeat=drafts):
        drawn, ratios = 1.0, []
        for k, token in enumerate(text):
            context = (0, 1, *text[:k])
            drawn *= float(draft(context)[token])
            ratios.append(float(target(context)[token] / draft(context)[token]))
        by_block += drawn * sum(block_weights(ratios)[1:])
        by_token += drawn * sum(itertools.accumulate((min(1.0, r) for r in ratios), lambda a, b: a * b))
    return by_token, by_block


@pytest.mark.lossless
@pytest.mark.parametrize("cuts", [(), *itertools.product((None, 2), (1.0, 0.9), (0.0, 0.15))], ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_block_never_accepts_less_in_expectation(temperature, cuts):
    better = 0
    for seed in range(120 if not cuts else 40):
        vocabulary, drafts = 2 + seed % 3, 1 + seed % 4 if seed % 3 < 2 else 2
        target = by_hand(random_table(vocabulary, seed), Sampling(temperature, *cuts))
        by_token, by_block = accepted_by_formula(target, random_table(vocabulary, seed + 5000), drafts)
        assert by_block >= by_token - 1e-12
        # With one draft the rules are the same.
        assert drafts > 1 or by_block == pytest.approx(by_token, abs=1e-12)
        better += by_block > by_token + 1e-3
    assert better > 10


@pytest.mark.lossless
@pytest.mark.parametrize("sampling", COMBINATIONS, ids=str)
def test_expected_acceptance_of_the_code_is_that_of_the_formula(sampling):
    target, draft = edge_table(sampling.temperature), random_table(4, 5000)
    found = tuple(accepted_by_code(rule, target, draft, 2, deterministic=False, sampling=sampling) for rule in RULES)
    assert found == pytest.approx(accepted_by_formula(by_hand(target, sampling), draft, 2), abs=1e-12)
    # A one-hot drafter's weights are the target's own probabilities: nothing to gain, nothing lost.
    one_hot = [accepted_by_code(rule, target, draft, 3, deterministic=True, sampling=sampling) for rule in RULES]
    assert one_hot[0] == pytest.approx(one_hot[1], abs=1e-12)


def test_mistakes_are_named():
    logits, probs = torch.zeros(2, 3), torch.tensor([[1.0, 0.0, 0.0]])
    with pytest.raises(RecipeError, match="rejection='blocks'"):
        verify_tokens([0], probs, logits, Sampling(1.0), Enumerated([]), "blocks")
    with pytest.raises(VerificationError, match="drew token 1"):
        verify_tokens([1], probs, logits, Sampling(1.0), Enumerated([]), "block")
    assert accept_probability(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]), 0) == 1.0
