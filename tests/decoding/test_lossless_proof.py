"""Proofs by enumeration: the production code is run through every sequence of random choices, and what comes out is the target's distribution."""

from __future__ import annotations

import pytest
import torch
from decoding_toys import Enumerated, ToyDrafter, ToyTarget, all_outcomes, distance, random_table, texts
from torch import Tensor

from firesteel.decoding import verify
from firesteel.decoding.decode import decode_plain, decode_speculative
from firesteel.decoding.policies import StaticThreshold
from firesteel.decoding.sampling import Sampling
from firesteel.decoding.verify import accept_probability, residual, verify_tokens
from firesteel.errors import VerificationError

PROMPT = (0, 1)


def written(seed: int = 0, *, drafts=2, length=4, eos: set[int] | None = None, threshold=None, support=None, confidence=None, deterministic=False) -> float:
    """Distance between the distribution of `decode_speculative`'s texts and the target's own."""
    target, draft = random_table(3, seed), random_table(3, seed + 77, support=support)

    def program(chance: Enumerated) -> tuple[int, ...]:
        drafter = ToyDrafter(draft, chance, confidence, deterministic)
        done = decode_speculative(
            ToyTarget(target),
            drafter,
            PROMPT,
            draft_tokens=drafts,
            max_new_tokens=length,
            eos_ids=eos or set(),
            temperature=1.0,
            lengths=None if threshold is None else StaticThreshold(threshold),
            chance=chance,
        )
        return tuple(done.tokens)

    return distance(all_outcomes(program), texts(target, PROMPT, length, eos or set()))


def honest(context: tuple[int, ...], token: int) -> float:
    """A confidence made from the tokens before it."""
    return (0.9, 0.5, 0.7)[sum(context) % 3]


def peeking(context: tuple[int, ...], token: int) -> float:
    """A confidence made from the very token it speaks of: not allowed."""
    return (0.9, 0.1, 0.7)[token % 3]


@pytest.mark.lossless
@pytest.mark.parametrize("seed", [0, 1])
def test_texts_have_the_targets_distribution(seed):
    assert written(seed) < 1e-9


@pytest.mark.lossless
def test_end_of_text_within_a_block_keeps_the_distribution():
    assert written(2, eos={1}) < 1e-9


@pytest.mark.lossless
def test_reduced_draft_vocabulary_keeps_the_distribution():
    assert written(3, support=(0, 2)) < 1e-9


@pytest.mark.lossless
def test_deterministic_drafter_keeps_the_distribution():
    assert written(4, deterministic=True, drafts=3) < 1e-9


@pytest.mark.lossless
@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.95])
def test_confidence_threshold_keeps_the_distribution(threshold):
    assert written(5, threshold=threshold, confidence=honest, eos={2}) < 1e-9


@pytest.mark.lossless
def test_confidence_that_sees_its_own_token_is_caught():
    assert written(5, length=3, threshold=0.6, confidence=peeking) > 1e-2


@pytest.mark.lossless
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("accept_probability", lambda target, draft, token: min(1.0, float(draft[token] / target[token]))),
        ("accept_probability", lambda target, draft, token: float(target[token])),
        ("accept_probability", lambda target, draft, token: 0.9 * accept_probability(target, draft, token)),
        ("residual", lambda target, draft: target),
        ("residual", lambda target, draft: (target - draft).abs()),
        ("residual", lambda target, draft: (target - draft).clamp_min(0) + 0.05),
    ],
)
def test_wrong_rules_are_caught(monkeypatch, name, wrong):
    assert written(0, length=3) < 1e-9
    monkeypatch.setattr(verify, name, wrong)
    assert written(0, length=3) > 1e-3


@pytest.mark.lossless
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6), Sampling(1.5, top_k=2), Sampling(1.0, top_p=0.8)])
def test_one_round_of_three_drafts_over_four_tokens(sampling):
    target, draft = random_table(4, 11), random_table(4, 12)

    def warped(context: tuple[int, ...]) -> Tensor:
        # Written out by hand, so as not to lean on the code under test.
        scores = target(context).log() / sampling.temperature
        probs = scores.exp() / scores.exp().sum()
        order = sorted(range(4), key=lambda v: -float(probs[v]))
        if sampling.top_k is not None:
            probs[order[sampling.top_k :]] = 0
        total = 0.0
        for v in order:
            if total >= sampling.top_p:
                probs[v] = 0
            total += float(probs[v])
        return probs / probs.sum()

    def program(chance: Enumerated) -> tuple[int, ...]:
        proposal = ToyDrafter(draft, chance, seen=[0]).draft(1, 3, temperature=1.0, generator=None)
        logits = ToyTarget(target, tokens=[0]).forward([1, *proposal.tokens]).logits
        verdict = verify_tokens(proposal.tokens, proposal.probs, logits, sampling, chance)
        return (*proposal.tokens[: verdict.accepted], verdict.next_token)

    found: dict[tuple[int, ...], float] = {}
    for text, probability in all_outcomes(program).items():
        for rest, p in texts(warped, (*PROMPT, *text), 4 - len(text), set()).items():  # the target alone writes what the round left open
            found[*text, *rest] = found.get((*text, *rest), 0.0) + probability * p
    assert distance(found, texts(warped, PROMPT, 4, set())) < 1e-9


@pytest.mark.lossless
def test_plain_decoding_has_the_targets_distribution():
    target = random_table(3, 21)
    found = all_outcomes(lambda chance: tuple(decode_plain(ToyTarget(target), PROMPT, max_new_tokens=4, eos_ids={1}, temperature=1.0, chance=chance).tokens))
    assert distance(found, texts(target, PROMPT, 4, {1})) < 1e-9


def test_acceptance_is_one_minus_total_variation():
    target, draft = random_table(4, 31)((0,)), random_table(4, 32)((0,))
    accepted = sum(float(draft[x]) * accept_probability(target, draft, x) for x in range(4))
    assert accepted == pytest.approx(1 - 0.5 * float((target - draft).abs().sum()), abs=1e-12)


def test_residual_of_equal_distributions_is_the_target():
    row = random_table(4, 41)((0,))
    assert torch.equal(residual(row, row.clone()), row)


def test_a_token_the_drafter_could_not_have_drawn_is_refused():
    with pytest.raises(VerificationError, match="drew token 1"):
        accept_probability(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), 1)


def test_rows_must_match_the_drafts():
    with pytest.raises(VerificationError, match="3 rows"):
        verify_tokens([1, 2], None, torch.zeros(2, 4), Sampling(), Enumerated([]))
