"""SPS(B): measured, made monotone, kept on file, and plain about what was not measured."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest
from decoding_toys import Enumerated, ToyDrafter, ToyTarget, random_table

from firesteel.decoding.profile import Curve, Profile, ProfileKey, isotonic, load_profile, measure_curve, measure_profile, save_profile, stored_profile
from firesteel.errors import DataError, RecipeError

KEY = ProfileKey("a CPU, 2 threads", "model-1 float32", "lean", "1 request, 64 tokens of context")
CURVE = Curve((1, 4, 8, 16), (2.0, 3.0, 2.8, 6.0))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([1.0, 3.0, 2.0, 4.0], [1.0, 2.5, 2.5, 4.0]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([1.0, 5.0, 3.0, 1.0, 9.0], [1.0, 3.0, 3.0, 3.0, 9.0]),
        ([], []),
    ],
)
def test_isotonic_by_hand(values, wanted):
    assert isotonic(values) == pytest.approx(wanted)


def test_isotonic_is_the_nearest_non_decreasing_sequence():
    generator = np.random.default_rng(0)
    for _ in range(50):
        values = generator.normal(size=6).cumsum()
        found = np.array(isotonic(values))
        assert (np.diff(found) >= 0).all()
        best = ((found - values) ** 2).sum()
        # No non-decreasing sequence near it does better.
        for _ in range(50):
            other = np.sort(found + 0.1 * generator.normal(size=6))
            assert ((other - values) ** 2).sum() >= best - 1e-12


def test_the_curve_never_falls_and_says_what_it_knows():
    assert CURVE.at([1, 4, 8, 16]) == pytest.approx([2.0, 2.9, 2.9, 6.0])
    assert CURVE.at(12) == pytest.approx(4.45)
    assert CURVE.at(32) == pytest.approx(12.0), "in proportion beyond what was measured"
    assert (np.diff(CURVE.at(np.arange(1, 100))) >= 0).all()
    assert [CURVE.origin(n) for n in (1, 5, 16, 17)] == ["measured", "interpolated", "measured", "extrapolated"]
    assert Curve((4,), (1.0,)).at([1, 4, 8]) == pytest.approx([1.0, 1.0, 2.0])
    assert Curve((4,), (1.0,)).origin(1) == "extrapolated"


def test_steps_per_second_include_the_drafter():
    profile = Profile(CURVE, Curve((1, 8), (0.5, 1.0)))
    assert profile.seconds([1, 1, 4], [0, 1, 8]) == pytest.approx([2.0, 2.5, 3.9])
    assert profile.steps_per_second(4) == pytest.approx(1 / 2.9)
    assert Profile(CURVE).seconds(1, 5) == pytest.approx(2.0)
    assert "1 to 16 tokens measured" in profile.describe()
    assert "drafting measured for 1 to 8 requests" in profile.describe()


@pytest.mark.parametrize(("sizes", "seconds"), [((), ()), ((1, 1), (1.0, 2.0)), ((2, 1), (1.0, 2.0)), ((0,), (1.0,)), ((1,), (1.0, 2.0)), ((1,), (0.0,))])
def test_what_is_no_curve_is_refused(sizes, seconds):
    with pytest.raises(DataError, match="is not one"):
        Curve(sizes, seconds)


def test_measuring_takes_turns_and_medians(monkeypatch):
    clock, asked = [0.0], []
    # Seconds of successive steps: a warm-up turn that does not count, then three.
    script = iter([9.0, 9.0, 1.0, 3.0, 1.1, 3.2, 50.0, 3.1])

    def step(size: int) -> None:
        asked.append(size)
        clock[0] += next(script)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    curve = measure_curve(step, [4, 1], repeats=3)
    assert asked == [1, 4] * 4
    assert curve.sizes == (1, 4)
    assert curve.seconds == pytest.approx((1.1, 3.1))


def test_what_comes_before_a_step_is_run_and_not_timed(monkeypatch):
    clock, done = [0.0], []

    def work(name: str, seconds: float, size: int) -> None:
        done.append((name, size))
        clock[0] += seconds * size

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    curve = measure_curve(lambda n: work("step", 1.0, n), [1, 2], repeats=1, before=lambda n: work("before", 50.0, n))
    assert done == [("before", 1), ("step", 1), ("before", 2), ("step", 2)] * 2
    assert curve.seconds == pytest.approx((1.0, 2.0))


@pytest.mark.parametrize(("sizes", "repeats"), [([], 1), ([0], 1), ([1], 0)])
def test_nothing_to_measure_is_refused(sizes, repeats):
    with pytest.raises(RecipeError, match="cannot measure"):
        measure_curve(lambda size: None, sizes, repeats=repeats)


def test_the_reference_engine_is_measured_and_left_as_it_was():
    target, drafter = ToyTarget(random_table(3, 0)), ToyDrafter(random_table(3, 1), Enumerated([]), deterministic=True)
    profile = measure_profile(target, drafter, [0, 1, 2], draft_tokens=3, repeats=2)
    assert profile.step.sizes == (1, 2, 3, 4)
    assert profile.draft is not None
    assert profile.draft.sizes == (1,)
    assert target.tokens == drafter.seen == [0, 1, 2]
    assert measure_profile(target, None, [0], draft_tokens=1, repeats=1).draft is None


@pytest.mark.parametrize("draft", [None, Curve((1, 8), (0.5, 1.0))])
def test_a_profile_is_measured_once_for_a_key(tmp_path, draft):
    profile, calls = Profile(CURVE, draft), []

    def measure() -> Profile:
        calls.append(1)
        return profile

    assert load_profile(tmp_path / "new", KEY) is None
    assert stored_profile(tmp_path / "new", KEY, measure) == profile
    assert stored_profile(tmp_path / "new", KEY, measure) == profile
    assert len(calls) == 1
    for changed in dataclasses.fields(ProfileKey):
        stored_profile(tmp_path / "new", dataclasses.replace(KEY, **{changed.name: "other"}), measure)
    assert len(calls) == 5
    content = json.loads((tmp_path / "new" / KEY.file).read_text())
    assert content["step"]["seconds"] == [2.0, 3.0, 2.8, 6.0], "as measured, not as smoothed"
    assert content["key"]["machine"] == KEY.machine


@pytest.mark.parametrize("text", ["", "{}", '{"format_version": 1}', "[1]", "null"])
def test_a_damaged_profile_is_named(tmp_path, text):
    path = save_profile(tmp_path, KEY, Profile(CURVE))
    path.write_text(text)
    with pytest.raises(DataError, match="damaged"):
        load_profile(tmp_path, KEY)


def test_a_profile_of_something_else_is_refused(tmp_path):
    path = save_profile(tmp_path, KEY, Profile(CURVE))
    path.write_text(path.read_text().replace("model-1", "model-2"))
    with pytest.raises(DataError, match="something else"):
        load_profile(tmp_path, KEY)
