"""The simulation against what can be worked out on paper, and its books."""

from __future__ import annotations

import math
import time

import pytest

from firesteel.cluster.simulate import Event, Outcome, Simulation, Site, conserved


def simulate(sites: list[Site], step: float, seconds: float, **more: object) -> Outcome:
    outcome = Simulation(sites, step, **more).run(seconds)  # type: ignore[arg-type]
    assert conserved(outcome)
    return outcome


def test_a_slow_server_lets_the_trainer_wait_by_the_difference() -> None:
    """One server of 2 units a second, steps of 0.4 s for one unit: the trainer works 0.8 of its time."""
    out = simulate([Site((2.0,), math.inf, 4, 1)], 0.4, 1000, spread=0.0)
    assert out.steps == pytest.approx(2000, abs=2)
    assert out.waited == pytest.approx(0.2, abs=0.001)
    assert out.full == 0


def test_a_slow_trainer_lets_the_server_pause_by_the_difference() -> None:
    out = simulate([Site((4.0,), math.inf, 4, 1)], 0.5, 1000, spread=0.0)
    assert out.steps == pytest.approx(2000, abs=2)
    assert out.waited < 0.001
    assert out.full == pytest.approx(0.5, abs=0.005)


def test_a_saturated_link_sets_the_pace() -> None:
    """Ten servers could make ten times what the link carries."""
    out = simulate([Site((5.0,) * 10, 5.0, 64, 2)], 0.1, 1000)
    assert out.steps == pytest.approx(2500, rel=0.01)
    assert out.link_busy == pytest.approx(1.0, abs=0.005)
    assert out.waited == pytest.approx(1 - 2500 * 0.1 / 1000, abs=0.01)


def test_a_link_at_half_load_is_half_busy() -> None:
    out = simulate([Site((2.0,), 4.0, 64, 1)], 0.01, 2000, spread=0.0)
    assert out.link_busy == pytest.approx(0.5, abs=0.01)


def test_poisson_units_and_even_steps_queue_as_m_d_1() -> None:
    """Mean number waiting is rho^2 / (2 (1 - rho))."""
    rho = 0.8
    out = simulate([Site((1.0,), math.inf, 10**9, 1)], rho, 200_000, spread=1.0)
    assert out.depth == pytest.approx(rho**2 / (2 * (1 - rho)), rel=0.06)
    assert out.waited == pytest.approx(1 - rho, abs=0.01)


@pytest.mark.parametrize(("rho", "high"), [(1.25, 3), (0.8, 2)])
def test_exponential_units_and_steps_in_a_bounded_queue_are_m_m_1_k(rho: float, high: int) -> None:
    """`high` places and one in the trainer's hands: full with probability (1 - rho) rho^K / (1 - rho^(K + 1)), K = high + 1."""
    k = high + 1
    share = (1 - rho) / (1 - rho ** (k + 1))
    out = simulate([Site((rho,), math.inf, high, 1)], 1.0, 200_000, spread=1.0, step_spread=1.0)
    assert out.full == pytest.approx(share * rho**k, rel=0.05)
    assert out.waited == pytest.approx(share, rel=0.05)


def test_trainers_in_step_wait_for_the_slowest_site() -> None:
    out = simulate([Site((1.0,), math.inf, 8, 1), Site((4.0,), math.inf, 8, 1)], 0.1, 1000, spread=0.0)
    assert out.steps == pytest.approx(1000, abs=3)
    assert out.full == pytest.approx(0.75 / 2, abs=0.01), "the faster server pauses three quarters of its time"


def test_a_server_that_ends_and_one_that_comes_back() -> None:
    gone = simulate([Site((1.0, 1.0), math.inf, 8, 1)], 0.01, 1000, spread=0.0, events=[Event(500, "fail", 0, 0)])
    assert gone.made == pytest.approx(1500, abs=3)
    assert gone.down == pytest.approx(0.25)
    back = simulate([Site((1.0, 1.0), math.inf, 8, 1)], 0.01, 1000, spread=0.0, events=[Event(200, "fail", 0, 0), Event(600, "join", 0, 0)])
    assert back.made == pytest.approx(1600, abs=3)
    none_left = simulate([Site((1.0,), math.inf, 8, 1)], 0.01, 1000, events=[Event(100, "fail", 0, 0)])
    assert none_left.waited == pytest.approx(1 - none_left.steps * 0.01 / 1000, abs=0.001)
    assert none_left.steps < 120


def test_what_a_server_still_sends_is_lost_with_it_and_counted() -> None:
    out = simulate([Site((10.0,), 2.0, 50, 1)], 0.01, 60, events=[Event(30, "fail", 0, 0), Event(40, "join", 0, 0)])
    assert out.lost > 10
    assert out.made == out.consumed + out.queued + out.moving + out.lost


@pytest.mark.parametrize("seed", range(5))
def test_the_books_balance_whatever_fails(seed: int) -> None:
    sites = [Site((3.0, 2.0, 2.0), 6.0, 12, 2), Site((4.0, 4.0), 9.0, 7, 3), Site((1.5,) * 5, 20.0, 30, 2)]
    out = simulate(sites, 0.3, 2000, spread=0.8, step_spread=0.4, failure_every=120.0, repair=20.0, seed=seed)
    assert out.down == pytest.approx(20 / 140, rel=0.2)
    assert out.made > 1000
    assert out.lost > 0
    assert 0 <= out.waited <= 1
    assert 0 <= out.full <= 1


def test_equal_seeds_give_equal_runs() -> None:
    site = [Site((3.0, 2.0), 6.0, 12, 2)]
    runs = [simulate(site, 0.3, 500, spread=0.8, failure_every=100.0, repair=10.0, seed=s) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_thousand_nodes_for_an_hour_within_a_minute() -> None:
    """333 groups of two servers and a trainer, units of about five seconds."""
    started = time.process_time()
    out = simulate([Site((0.4, 0.4), 50.0, 16, 4)] * 333, 5.0, 3600, failure_every=36_000.0, repair=300.0)
    assert out.made > 500_000
    assert time.process_time() - started < 60
