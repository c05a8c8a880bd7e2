"""Prompts under load: the engine itself on a clock of its own, with and without a drafter that has to observe what is read.

`test_loaded_engine` has the machines; here every position that the drafter observes takes a share of what the target's reading takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from test_loaded_engine import MACHINES, SIZES
from torch import Tensor

from firesteel.decoding.adaptive import AsynchronousScheduler, Scheduler
from firesteel.decoding.batched import engine as engines
from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask, Piece
from firesteel.decoding.policies import FixedLength, LengthPolicy
from firesteel.decoding.profile import Curve, Profile
from firesteel.drafters.rows import Draft, Want
from firesteel.kernels.spans import Span

VOCABULARY, WRONG, DRAFTS = 12, 11, 7


def token(position: int) -> int:
    """All texts are alike."""
    return (5 * position + 3) % (VOCABULARY - 1)


@dataclass
class Clock:
    """Seconds; milliseconds are added."""

    now: float = 0.0

    def add(self, milliseconds: float) -> None:
        self.now += milliseconds / 1000


class Target:
    shares_prefix, max_length = True, 10_000

    def __init__(self, machine: str, clock: Clock) -> None:
        self.machine, self.clock = machine, clock
        self.read = 0

    def forward(self, tokens: Tensor, spans: Sequence[Span], keep: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.clock.add(float(MACHINES[self.machine][0](np.array(len(tokens)))))
        self.read += len(tokens)
        rows = [token(p + 1) for s, n in zip(spans, keep, strict=True) for p in range(s.end - n, s.end)]
        places = torch.cat([torch.arange(s.start, s.end) for s in spans])
        return torch.nn.functional.one_hot(torch.tensor(rows, dtype=torch.long), VOCABULARY).float(), places[:, None].float()

    def forget(self, key: int) -> None:
        pass


class Drafter:
    """Right at every token with probability `rate`; `share` of the target's time per position goes into observing it."""

    shares_prefix, num_drafts, scratch = True, DRAFTS, 0

    def __init__(self, machine: str, clock: Clock, rate: float, share: float) -> None:
        self.machine, self.clock, self.rate = machine, clock, rate
        step = MACHINES[machine][0]
        self.each = share * float(step(np.array(512)) - step(np.array(1))) / 511
        self.random = np.random.default_rng(0)
        self.known: dict[int, int] = {}  # positions observed
        self.observed = self.drafts = 0

    def observe(self, tokens: Tensor, spans: Sequence[Span], aux: Tensor) -> None:
        self.clock.add(self.each * len(tokens))
        self.observed += len(tokens)
        assert aux[:, 0].tolist() == [p for s in spans for p in range(s.start, s.end)], "the states are those of the positions"
        for span in spans:
            assert span.start <= self.known.get(span.key, span.start), "no hole"
            self.known[span.key] = span.end

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        _, fixed, each = MACHINES[self.machine]
        self.clock.add(fixed + each * len(wants))
        self.drafts += len(wants)
        made = []
        for want in wants:
            assert self.known[want.span.key] == want.span.start, "all before the anchor is known"
            right = self.random.random(want.count) < self.rate
            made.append(Draft([token(want.span.start + 1 + k) if ok else WRONG for k, ok in enumerate(right)], None, None))
        return made

    def forget(self, key: int) -> None:
        self.known.pop(key, None)


@dataclass
class Load:
    """`requests` at a time, each with a prompt and an answer of so many tokens; `alike` prompts begin with the same text."""

    machine: str
    requests: int
    prompt: int
    answer: int
    rate: float
    share: float = 0.04
    count: int = 60

    def profile(self) -> Profile:
        step, fixed, each = MACHINES[self.machine]
        counts = (1, 8, 64, 256)
        return Profile(Curve(SIZES, tuple(float(step(np.array(n))) / 1000 for n in SIZES)), Curve(counts, tuple((fixed + each * n) / 1000 for n in counts)))

    def run(self, monkeypatch: pytest.MonkeyPatch, make: Callable[[Profile], LengthPolicy] | None) -> tuple[float, Drafter, Engine]:
        clock = Clock()
        with monkeypatch.context() as patch:
            patch.setattr(time, "perf_counter", lambda: clock.now)
            drafter = Drafter(self.machine, clock, self.rate, self.share)
            policy = None if make is None else make(self.profile())
            engine = Engine(
                Target(self.machine, clock),
                None if make is None else drafter,
                BlockPool(20_000, 16),
                draft_tokens=0 if make is None else DRAFTS,
                policy=policy,
                max_requests=self.requests,
            )
            for number in range(self.count):
                self.ask(engine, number)
            while engine.step():
                pass
        assert engine.pool.used == 0
        return clock.now, drafter, engine

    def ask(self, engine: Engine, number: int) -> None:
        heard: list[int] = []

        def tell(piece: Piece) -> None:
            heard.extend(piece.tokens)
            if piece.finish is not None:
                assert heard == [token(self.prompt + k) for k in range(self.answer)]

        # A first token of its own: nothing of the prompt is shared.
        engine.submit(Ask((number % VOCABULARY, number, *(token(p) for p in range(2, self.prompt))), self.answer), tell)


def scheduled(profile: Profile) -> Scheduler:
    return Scheduler(profile, prior=[0.7, 0.65, 0.6])


def asynchronous(profile: Profile) -> AsynchronousScheduler:
    return AsynchronousScheduler(profile, prior=[0.7, 0.65, 0.6])


@pytest.mark.parametrize("make", [scheduled, asynchronous])
@pytest.mark.parametrize(("requests", "prompt", "answer"), [(1, 300, 20), (16, 300, 40), (64, 120, 60), (16, 900, 4), (4, 500, 1)])
@pytest.mark.parametrize("machine", MACHINES)
def test_prompts_that_the_drafter_observes_cost_little_where_it_does_not_pay(monkeypatch, machine, requests, prompt, answer, make) -> None:
    load = Load(machine, requests, prompt, answer, rate=0.02, share=0.1, count=max(40, 2 * requests))
    plain, _, _ = load.run(monkeypatch, None)
    took, _, _ = load.run(monkeypatch, make)
    assert plain / took > 0.97


def test_a_fixed_length_pays_for_all_of_it(monkeypatch) -> None:
    load = Load("processor", 16, 900, 4, rate=0.02)
    plain, _, _ = load.run(monkeypatch, None)
    took, drafter, _ = load.run(monkeypatch, lambda profile: FixedLength(1))
    assert plain / took < 0.97
    assert drafter.observed > load.count * load.prompt


@pytest.mark.parametrize(
    ("machine", "requests", "prompt", "gain"),
    [("accelerator", 1, 300, 4.0), ("accelerator", 8, 300, 2.5), ("accelerator", 1, 3000, 2.0), ("processor", 1, 60, 1.1)],
)
def test_where_drafting_pays_prompts_are_observed_and_drafted_behind(monkeypatch, machine, requests, prompt, gain) -> None:
    load = Load(machine, requests, prompt, 60, rate=0.95, count=24)
    plain, _, _ = load.run(monkeypatch, None)
    took, drafter, engine = load.run(monkeypatch, scheduled)
    assert drafter.observed > 0.9 * load.count * load.prompt
    assert plain / took > gain
    assert engine.counters.accepted > 0.5 * load.count * load.answer


def test_prompts_are_held_back_while_the_batch_is_full_and_observed_once_it_has_emptied(monkeypatch) -> None:
    load = Load("processor", 64, 40, 40, rate=0.95)
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    drafter, policy = Drafter("processor", clock, 0.95, 0.04), scheduled(load.profile())
    policy._idle = True
    engine = Engine(Target("processor", clock), drafter, BlockPool(20_000, 16), draft_tokens=DRAFTS, policy=policy, max_requests=64)
    ended: list[int] = []
    engine.submit(Ask((1, *(token(p) for p in range(1, 40))), 40), lambda piece: ended.extend(piece.tokens))
    engine.step()
    assert drafter.observed == 0, "the prompt is read and its states wait"
    while engine.step():
        pass
    assert drafter.observed >= 40
    assert drafter.drafts > 0
    assert ended == [token(40 + k) for k in range(40)]


def test_what_is_held_back_is_bounded_and_what_is_let_go_stays_without_drafter(monkeypatch) -> None:
    monkeypatch.setattr(engines, "_HELD_IN_ALL", 100)
    load = Load("accelerator", 4, 60, 30, rate=0.95, count=4)
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    drafter, policy = Drafter("accelerator", clock, 0.95, 0.04), scheduled(load.profile())
    policy._idle = True
    engine = Engine(Target("accelerator", clock), drafter, BlockPool(20_000, 16), draft_tokens=DRAFTS, policy=policy, max_requests=4)
    for number in range(4):
        load.ask(engine, number)
    engine.step()
    held = [r.length - r.seen for r in engine._running if r.held]
    assert held == [60], "one of four fits"
    assert sum(r.deaf for r in engine._running) == 3
    while engine.step():
        pass
    assert engine.counters.accepted > 0, "it is drafted for"
    assert drafter.observed < 60 + 30 + 2
