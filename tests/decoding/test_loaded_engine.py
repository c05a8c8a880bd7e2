"""A loaded engine, simulated: whatever the drafter does, scheduled drafting is never slower than no drafter by more than 3%.

Time is discrete (engine steps) and costs are curves such as machines have: flat while weights are being read, then linear, with
stairs; or nearly linear from the start, as on a CPU. The scheduler sees such a curve as a noisy measurement gives it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from firesteel.decoding.adaptive import AsynchronousScheduler, Scheduler
from firesteel.decoding.policies import Drafted, FixedLength, LengthPolicy, Request
from firesteel.decoding.profile import Curve, Profile

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BLOCK = 7


def accelerator(tokens: np.ndarray) -> np.ndarray:
    """Milliseconds: 9 to read the weights, 0.05 for each token once that takes longer; work comes in tiles of 16 tokens."""
    tiles = np.ceil(tokens / 16) * 16
    return np.maximum(9.0 + 0.004 * tiles, 1.0 + 0.05 * tiles)


def stairs(tokens: np.ndarray) -> np.ndarray:
    """Milliseconds: graphs were captured for powers of two only, a step takes that of the next larger one."""
    return 6.0 + 0.06 * 2.0 ** np.ceil(np.log2(np.maximum(tokens, 8)))


def processor(tokens: np.ndarray) -> np.ndarray:
    """Milliseconds: 25 for a token, half as much for each further one."""
    return 25.0 + 12.0 * (tokens - 1)


MACHINES = {"accelerator": (accelerator, 0.7, 0.012), "stairs": (stairs, 0.5, 0.01), "processor": (processor, 3.0, 1.5)}


@dataclass
class Engine:
    """R requests at a time; one that ends is followed by another. Times in milliseconds.

    Args:
        machine: see `MACHINES`: the pass, the drafter's fixed time, and its time for each request.
        rates: what conditional acceptance rates a new request's drafts may have; it gets one of them.
        lie: added to every confidence; None: a drafter without confidences.
        tells: the policy is told the seconds of steps, measured to 3%.
    """

    machine: str
    rates: tuple[float, ...]
    lie: float | None = 0.0
    seed: int = 0
    tells: bool = True
    written: float = 0.0
    spent: float = 0.0
    plain: float = 0.0  # what the written tokens would have taken without the drafter
    verified: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.live: list[tuple[Request, float]] = []

    def seconds(self, tokens: int, drafting: int) -> float:
        step, fixed, each = MACHINES[self.machine]
        return float(step(np.array(tokens))) + (fixed + each * drafting if drafting else 0.0)

    def profile(self, noise: float = 0.03) -> Profile:
        measured = [self.seconds(n, 0) * float(np.exp(noise * self.random.standard_normal())) for n in SIZES]
        counts = (1, 8, 64, 256)
        return Profile(Curve(SIZES, tuple(measured)), Curve(counts, tuple(self.seconds(1, n) - self.seconds(1, 0) for n in counts)))

    def serve(self, policy: LengthPolicy, requests: int, steps: int) -> Engine:
        """Run steps at this load; requests beyond it leave."""
        del self.live[requests:]
        for _ in range(steps):
            while len(self.live) < requests:
                self.live.append((Request(), float(self.random.choice(self.rates))))
            self._step(policy)
        return self

    def _step(self, policy: LengthPolicy) -> None:
        requests = [r for r, _ in self.live]
        for r in requests:
            r.room = BLOCK
        counts = policy.plan(requests)
        # Some tokens are easier than others; a calibrated confidence knows which.
        chances = np.clip(np.array([[q] for _, q in self.live]) + 0.25 * self.random.uniform(-1, 1, (len(requests), BLOCK)), 0.0, 1.0)
        said = None if self.lie is None else np.clip(chances + self.lie, 0.0, 1.0)
        drafts = [Drafted(n, None if said is None or n == 0 else said[i, :n].tolist()) for i, n in enumerate(counts)]
        submitted = policy.admit(requests, drafts)
        assert all(0 <= n <= d.count for n, d in zip(submitted, drafts, strict=True))
        stood = (self.random.random(chances.shape) < chances).cumprod(1)
        accepted = [int(stood[i, :n].sum()) for i, n in enumerate(submitted)]
        here = len(requests)
        seconds = self.seconds(here + sum(submitted), sum(n > 0 for n in counts))
        policy.learn(requests, drafts, submitted, accepted, seconds * float(self.random.uniform(0.97, 1.03)) if self.tells else None)
        self.written += here + sum(accepted)
        self.plain += self.seconds(here, 0) * (here + sum(accepted)) / here
        self.spent += seconds
        self.verified += sum(submitted)
        self.live = [pair for pair in self.live if self.random.random() > 0.01]

    @property
    def speedup(self) -> float:
        return self.plain / self.spent


def scheduled(engine: Engine, kind: type[Scheduler] = Scheduler, **options: float) -> Scheduler:
    return kind(engine.profile(), prior=[0.7, 0.65, 0.6], **options)


# Drafts that hardly ever stand; with confidences that say otherwise; that stand too seldom to pay; some good and some bad requests.
WORST: list[tuple[tuple[float, ...], float | None]] = [((0.02,), 0.0), ((0.02,), 0.6), ((0.35,), 0.4), ((0.02, 0.9), None)]


@pytest.mark.parametrize("kind", [Scheduler, AsynchronousScheduler])
@pytest.mark.parametrize(("requests", "steps"), [(1, 300), (16, 200), (64, 200)])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_drafter_never_slows_a_loaded_engine_by_more_than_3_percent(machine, requests, steps, kind):
    for seed, (rates, lie) in enumerate(WORST):
        engine = Engine(machine, rates, lie, seed)
        assert engine.serve(scheduled(engine, kind), requests, steps).speedup > 0.97, (rates, lie)


def test_without_a_scheduler_it_does():
    assert Engine("accelerator", (0.6,)).serve(FixedLength(7), 128, 50).speedup < 0.8
    assert Engine("processor", (0.6,)).serve(FixedLength(3), 8, 50).speedup < 0.85


@pytest.mark.parametrize(
    ("machine", "rate", "requests", "kind"),
    [
        ("accelerator", 0.6, 8, Scheduler),
        ("accelerator", 0.9, 64, Scheduler),
        ("accelerator", 0.6, 8, AsynchronousScheduler),
        ("stairs", 0.9, 32, AsynchronousScheduler),
        ("processor", 0.9, 1, Scheduler),
    ],
)
def test_where_drafting_pays_it_is_about_as_fast_as_the_best_fixed_length(machine, rate, requests, kind):
    best = max(Engine(machine, (rate,)).serve(FixedLength(n), requests, 150).speedup for n in (1, 2, 3, 5, 7))
    engine = Engine(machine, (rate,))
    assert best > 1.2
    assert engine.serve(scheduled(engine, kind), requests, 300).speedup > 0.94 * best


def test_load_comes_and_goes():
    engine = Engine("accelerator", (0.7,))
    policy = scheduled(engine)
    engine.serve(policy, 4, 60)
    calm = engine.verified / 60
    assert engine.speedup > 2
    before = engine.verified, engine.plain, engine.spent
    engine.serve(policy, 300, 20)
    assert engine.verified == before[0], "a full batch is left alone"
    assert (engine.plain - before[1]) / (engine.spent - before[2]) == pytest.approx(1)
    busy = engine.verified
    engine.serve(policy, 4, 60)
    assert (engine.verified - busy) / 60 > 0.8 * calm, "and drafting is back at once when it has emptied"


@dataclass
class Mistaken:
    """A profile by which longer steps cost next to nothing."""

    profile: Profile

    def seconds(self, tokens: np.ndarray, drafting: np.ndarray | int = 0) -> np.ndarray:
        return self.profile.seconds(1, drafting) + 0.001 * np.asarray(tokens)


@pytest.mark.parametrize("kind", [Scheduler, AsynchronousScheduler])
def test_a_mistaken_profile_costs_little_where_the_engine_tells_its_seconds(kind):
    engine = Engine("processor", (0.3,))
    assert engine.serve(kind(Mistaken(engine.profile()), prior=[0.7]), 8, 400).speedup > 0.97
    silent = Engine("processor", (0.3,), tells=False)
    assert silent.serve(kind(Mistaken(silent.profile()), prior=[0.7]), 8, 100).speedup < 0.9


def test_a_request_whose_drafts_fall_goes_without_while_others_are_drafted_for():
    engine = Engine("accelerator", (0.0, 0.9), seed=3)
    policy = scheduled(engine)
    engine.serve(policy, 72, 120)
    counts = policy.plan([r for r, _ in engine.live])
    known = [(q, n > 0) for (r, q), n in zip(engine.live, counts, strict=True) if r.tallies is not None]
    good, bad = [drafted for q, drafted in known if q > 0.5], [drafted for q, drafted in known if q < 0.5]
    assert min(len(good), len(bad)) > 5
    assert np.mean(good) > 0.9
    assert np.mean(bad) < 0.1
