"""Length policies at work in the reference engine: texts keep the target's distribution, whatever a policy remembers and decides."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from decoding_toys import Enumerated, ToyDrafter, ToyTarget, all_outcomes, distance, random_table, texts

from firesteel.decoding import decode
from firesteel.decoding.adaptive import AsynchronousScheduler, Scheduler
from firesteel.decoding.decode import Decoded, decode_plain, decode_speculative
from firesteel.decoding.policies import Drafted, FixedLength, LengthPolicy, Request, StaticThreshold
from firesteel.decoding.sampling import Sampling
from firesteel.decoding.verify import verify_tokens
from firesteel.errors import RecipeError


@dataclass
class Listed:
    """Costs from a list of seconds of 1, 2, ... tokens, and in proportion beyond it; drafting takes 0.05."""

    step: tuple[float, ...]

    def seconds(self, tokens: np.ndarray, drafting: np.ndarray | int = 0) -> np.ndarray:
        known = len(self.step)
        return np.array(self.step)[np.minimum(tokens, known) - 1] * np.maximum(1, np.asarray(tokens) / known) + 0.05 * (np.asarray(drafting) > 0)


SMOOTH, STAIR = Listed((1.0, 1.25, 1.65, 2.2)), Listed((1.0, 1.6, 1.62, 1.64))
POLICIES = {
    "fixed 1": lambda: FixedLength(1),
    "fixed 2": lambda: FixedLength(2),
    "threshold": lambda: StaticThreshold(0.5),
    "scheduler": lambda: Scheduler(SMOOTH, prior=[0.6], probe=0.3),
    "scheduler, stair": lambda: Scheduler(STAIR, prior=[0.9, 0.8], probe=0.3),
    "asynchronous": lambda: AsynchronousScheduler(SMOOTH, prior=[0.6], probe=0.3),
    "asynchronous, stair": lambda: AsynchronousScheduler(STAIR, prior=[0.9, 0.8], probe=0.3),
}


def honest(context: tuple[int, ...], token: int) -> float:
    return (0.95, 0.4, 0.75)[(sum(context) + len(context)) % 3]


@pytest.mark.lossless
@pytest.mark.parametrize("rejection", ["token", "block"])
@pytest.mark.parametrize("name", POLICIES)
def test_texts_keep_the_targets_distribution(name, rejection):
    """Two tokens, five of text: several rounds, so that policies which remember have something to remember."""
    target, draft, submitted = random_table(2, 4), random_table(2, 90), set()

    def program(chance: Enumerated) -> tuple[int, ...]:
        done = decode_speculative(
            ToyTarget(target),
            ToyDrafter(draft, chance, None if name.startswith("fixed") else honest),
            (0, 1),
            draft_tokens=2,
            max_new_tokens=5,
            eos_ids=(),
            temperature=1.0,
            rejection=rejection,
            lengths=POLICIES[name](),
            chance=chance,
        )
        submitted.update(r.drafted for r in done.rounds)
        return tuple(done.tokens)

    assert distance(all_outcomes(program), texts(target, (0, 1), 5, set())) < 1e-9
    assert len(submitted) > 1


@dataclass
class Choosy:
    """A policy that is not allowed: it drafts two tokens and looks at the second confidence, which is made from the first token, for the first."""

    def plan(self, requests: list[Request]) -> list[int]:
        return [r.room for r in requests]

    def admit(self, requests: list[Request], drafts: list[Drafted]) -> list[int]:
        return [d.count if d.count > 1 and d.confidences is not None and d.confidences[1] > 0.5 else 0 for d in drafts]

    def learn(self, requests, drafts, submitted, accepted, seconds) -> None:
        pass


@pytest.mark.lossless
@pytest.mark.parametrize("rejection", ["token", "block"])
def test_a_policy_that_looks_ahead_is_caught(rejection):
    target, draft = random_table(2, 4), random_table(2, 90)

    def program(chance: Enumerated) -> tuple[int, ...]:
        drafter = ToyDrafter(draft, chance, honest)
        options = {"draft_tokens": 2, "max_new_tokens": 4, "eos_ids": (), "temperature": 1.0, "rejection": rejection}
        return tuple(decode_speculative(ToyTarget(target), drafter, (0, 1), lengths=Choosy(), chance=chance, **options).tokens)

    assert distance(all_outcomes(program), texts(target, (0, 1), 4, set())) > 1e-3


@dataclass
class Watched(ToyDrafter):
    """Remembers how it was used; deterministic, from the table of the target or another."""

    drafted: int = 0
    observed: list[int] = field(default_factory=list)

    def observe(self, tokens: object, aux: torch.Tensor) -> None:
        self.observed.append(len(aux))
        super().observe(tokens, aux)

    def draft(self, anchor, count, *, temperature, generator):
        self.drafted += 1
        return super().draft(anchor, count, temperature=temperature, generator=generator)


def write(policy: LengthPolicy, seed: int, *, tokens: int = 60) -> tuple[Decoded, Watched]:
    """Greedy text of a target (seed 4) by a drafter that is the target itself (seed 4) or not."""
    drafter = Watched(random_table(5, seed), Enumerated([]), deterministic=True)
    target = ToyTarget(random_table(5, 4), max_length=2000)
    done = decode_speculative(target, drafter, (0, 1), draft_tokens=3, max_new_tokens=tokens, eos_ids=(), lengths=policy)
    assert done.tokens == decode_plain(ToyTarget(random_table(5, 4), max_length=2000), (0, 1), max_new_tokens=tokens, eos_ids=()).tokens
    return done, drafter


@pytest.mark.parametrize("kind", [Scheduler, AsynchronousScheduler])
def test_a_drafter_that_is_never_right_is_left_alone(kind):
    # A cycle of the target's text, so that a drafter of another table is nearly always wrong.
    done, drafter = write(kind(SMOOTH, prior=[0.7]), 77, tokens=300)
    assert sum(r.accepted for r in done.rounds) < 0.1 * len(done.rounds)
    assert drafter.drafted < 0.1 * len(done.rounds)
    # While it is silent its observations are put together; it is shown all before it drafts again.
    assert len(drafter.observed) < 0.2 * len(done.rounds)
    assert max(drafter.observed[1:]) > 10


@pytest.mark.parametrize("kind", [Scheduler, AsynchronousScheduler])
def test_a_drafter_that_is_always_right_is_used_in_full(kind):
    done, drafter = write(kind(SMOOTH, prior=[0.7]), 4)
    assert done.acceptance_length > 2.7
    assert drafter.drafted >= len(done.rounds) - 1  # but for the last token, which needs no draft


def test_observations_do_not_pile_up_without_end(monkeypatch):
    monkeypatch.setattr(decode, "_HELD", 8)
    _, drafter = write(FixedLength(0), 77)
    assert drafter.drafted == 0
    assert drafter.observed[1:] == [8] * ((60 - 2) // 8)


def test_policies_ask_for_no_more_than_there_is_room_for():
    requests = [Request(room=n) for n in (0, 1, 7)]
    drafts = [Drafted(0), Drafted(1, [0.9]), Drafted(7, [0.9] * 7)]
    for make in POLICIES.values():
        policy = make()
        assert all(n <= r.room for n, r in zip(policy.plan(requests), requests, strict=True))
        assert policy.plan([]) == policy.admit([], []) == []
    assert StaticThreshold(0.5).admit(requests, drafts) == [0, 1, 6]
    assert FixedLength(3).plan(requests) == [0, 1, 3]
    assert FixedLength(3).admit(requests, drafts) == [0, 1, 7]


def test_confidences_that_proved_too_high_are_lowered():
    flat = Listed(tuple(1 + 0.3 * n for n in range(20)))
    policy, request = Scheduler(flat, prior=[0.9]), Request(room=7)
    draft = Drafted(7, [0.95] * 7)
    first = policy.admit([request], [draft])[0]
    for _ in range(30):
        policy.learn([request], [draft], [3], [1], None)  # the second of three falls every time
    assert first > 1
    assert policy.admit([request], [draft])[0] == 1
    assert policy.admit([Request(room=7)], [draft])[0] < first, "others' drafts are from the same drafter"


def test_mistakes_are_named():
    with pytest.raises(RecipeError, match="prior"):
        Scheduler(SMOOTH, prior=[])
    with pytest.raises(RecipeError, match="prior"):
        Scheduler(SMOOTH, prior=[1.2])
    with pytest.raises(RecipeError, match="confidence head"):
        StaticThreshold(0.5).admit([Request(room=2)], [Drafted(2)])


@pytest.mark.lossless
@pytest.mark.parametrize("kind", [Scheduler, AsynchronousScheduler])
def test_two_requests_in_one_engine_are_written_independently(kind):
    """Two steps of an engine with two requests, which share a policy, its memory and its account: the joint distribution is the product."""
    targets, drafts, prompts = [random_table(2, s) for s in (4, 5)], [random_table(2, s) for s in (90, 91)], [(0, 1), (1, 1)]
    costs, steps = Listed((1.0, 1.0, 1.2, 1.4)), set()

    def program(chance: Enumerated) -> tuple[tuple[int, ...], ...]:
        policy, requests, written = kind(costs, prior=[0.8], probe=0.3), [Request(room=1), Request(room=1)], [(), ()]
        for _ in range(2):
            made, counts = [], policy.plan(requests)
            for r, count in enumerate(counts):
                context = (*prompts[r], *written[r])
                made.append(
                    ToyDrafter(drafts[r], chance, honest, seen=list(context[:-1])).draft(context[-1], count, temperature=1.0, generator=None) if count else None
                )
            said = [Drafted(0) if m is None else Drafted(1, m.confidences) for m in made]
            lengths = policy.admit(requests, said)
            steps.add((tuple(counts), tuple(lengths)))
            accepted = []
            for r, (m, n) in enumerate(zip(made, lengths, strict=True)):
                context = (*prompts[r], *written[r])
                tokens = m.tokens[:n] if m is not None else []
                logits = ToyTarget(targets[r], tokens=list(context[:-1])).forward([context[-1], *tokens]).logits
                verdict = verify_tokens(tokens, m.probs[:n] if m is not None else None, logits, Sampling(1.0), chance, "block")
                written[r] = (*written[r], *tokens[: verdict.accepted], verdict.next_token)
                accepted.append(verdict.accepted)
            policy.learn(requests, said, lengths, accepted, None)
        return tuple(written)

    own = [texts(targets[r], prompts[r], 4, set()) for r in (0, 1)]
    found: dict[tuple[tuple[int, ...], ...], float] = {}
    for pair, probability in all_outcomes(program).items():
        ends = [texts(targets[r], (*prompts[r], *t), 4 - len(t), set()) for r, t in enumerate(pair)]
        for (a, p), (b, q) in itertools.product(ends[0].items(), ends[1].items()):
            key = ((*pair[0], *a), (*pair[1], *b))
            found[key] = found.get(key, 0.0) + probability * p * q
    assert distance(found, {(a, b): own[0][a] * own[1][b] for a, b in itertools.product(*own)}) < 1e-9
    assert len(steps) > 1
