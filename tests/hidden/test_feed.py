"""The feed against servers that are slow, dead, wrong, added and removed: every batch comes, in order, or it stops loudly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from feed_cases import Servers, check, make_works, quick

from firesteel.endpoints import pool
from firesteel.endpoints.roster import Roster, edit, read_status, read_urls
from firesteel.errors import FiresteelError, HiddenStateError, RecipeError, TargetError
from firesteel.hidden.feed import SampleFeed
from firesteel.recipe import Feed

WORKS = make_works([5 + (7 * i) % 11 for i in range(60)])
PLAN: Callable[[int], list[int]] = lambda b: [(3 * b + k) % 60 for k in range(3)]  # noqa: E731
STEP = 45


def make_feed(servers: Servers, urls: list[str] | Roster, settings: Feed | None = None) -> SampleFeed:
    roster = urls if isinstance(urls, Roster) else Roster(urls)
    return SampleFeed(servers.fetch, WORKS, roster, settings or quick(), step_tokens=STEP, check=check)


def keys(feed: SampleFeed, first: int, count: int) -> list[str]:
    return [s.key for b in range(first, first + count) for s in feed.take(b, PLAN)]


def wanted(first: int, count: int) -> list[str]:
    return [f"d{i}" for b in range(first, first + count) for i in PLAN(b)]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_batches_depend_on_their_number_alone(concurrency: int) -> None:
    servers = Servers()
    with make_feed(servers, ["a", "b", "c"], quick(concurrency=concurrency)) as feed:
        assert keys(feed, 0, 25) == wanted(0, 25)
        assert feed.report()["feed_peak_tokens"] <= 4 * STEP
    assert set(servers.served) == {"a", "b", "c"}
    assert max(servers.most.values()) <= concurrency


def test_a_run_resumed_in_the_middle_sees_the_same_batches() -> None:
    with make_feed(Servers(), ["a"]) as feed:
        assert keys(feed, 17, 5) == wanted(17, 5)
        assert keys(feed, 3, 4) == wanted(3, 4)  # and may go anywhere


def test_what_is_held_stays_below_the_high_mark_while_training_is_slow() -> None:
    servers = Servers()
    with make_feed(servers, ["a", "b"], quick(low_tokens=STEP, high_tokens=2 * STEP)) as feed:
        keys(feed, 0, 1)
        time.sleep(0.1)
        asked = len(servers.asked)
        time.sleep(0.1)
        assert len(servers.asked) == asked, "nothing is fetched beyond the high mark"
        assert sum(len(WORKS[int(key[1:])].token_ids) for _, key in servers.asked[3:]) <= 2 * STEP
        assert feed.report()["feed_peak_tokens"] <= 2 * STEP


@pytest.mark.parametrize("trouble", ["refuse", "hang", "slow", "corrupt", "others"])
def test_an_endpoint_in_trouble_is_left_out_and_taken_back(trouble: str) -> None:
    servers = Servers(broken={"bad": trouble})
    with make_feed(servers, ["good", "bad"], quick(retries=8, bad_share=0.5, concurrency=2, timeout=0.5)) as feed:
        assert keys(feed, 0, 30) == wanted(0, 30)
        bad = sum(e == "bad" for e, _ in servers.asked)
        assert 0 < bad < 0.4 * len(servers.asked)
        before = servers.served["bad"]
        servers.broken.clear()
        deadline, b = time.monotonic() + 30, 30
        while servers.served["bad"] < before + 20:
            assert keys(feed, b, 1) == wanted(b, 1)
            b += 1
            assert time.monotonic() < deadline, "never taken back"


def test_a_hanging_request_is_given_to_another_before_its_timeout() -> None:
    servers = Servers()
    with make_feed(servers, ["good", "bad"], quick(timeout=60, outage=100)) as feed:
        keys(feed, 0, 20)
        servers.broken["bad"] = "hang"
        started = time.monotonic()
        assert keys(feed, 20, 20) == wanted(20, 20)
        assert time.monotonic() - started < 30
        assert feed.report()["feed_late"] > 0


def test_an_endpoint_that_hangs_from_the_start_holds_nobody_up() -> None:
    servers = Servers(broken={"bad": "hang"})
    started = time.monotonic()
    with make_feed(servers, ["bad", "good"], quick(timeout=60, outage=100, concurrency=4)) as feed:
        assert keys(feed, 0, 20) == wanted(0, 20)
    assert time.monotonic() - started < 30


def test_requests_that_are_late_at_the_last_moment_leave_no_endpoint_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests, looked at all the time, half of them later than the others: whatever the moment, all endpoints are in use in the end."""
    monkeypatch.setattr(pool, "_SHORTEST", 0.0)
    monkeypatch.setattr(pool, "_TICK", 0.0005)  # at 0 the loop would spin, and threads that look at samples starve
    servers = Servers(seconds=0.0005)
    with make_feed(servers, ["a", "b"], quick(late_factor=1.01)) as feed:
        assert keys(feed, 0, 400) == wanted(0, 400)
        deadline = time.monotonic() + 10
        while any(e.flying for e in feed._pool._endpoints.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert feed.report()["feed_late"] > 20
        assert [(e.late, e.flying) for e in feed._pool._endpoints.values()] == [(0, 0)] * 2


def test_one_per_cent_of_corrupt_samples_are_counted_and_fetched_again() -> None:
    servers = Servers(corrupt_share=0.03, seconds=0.0005)
    with make_feed(servers, ["a", "b"]) as feed:
        assert keys(feed, 0, 150) == wanted(0, 150)
        assert 0 < feed.report()["feed_bad"] < 40


@pytest.mark.parametrize(
    ("servers", "settings", "kind", "words"),
    [
        (Servers(broken={"a": "refuse", "b": "refuse"}), {"outage": 1.0}, TargetError, ("no usable answer", "nobody listens")),
        (Servers(broken={"a": "hang", "b": "hang"}), {"timeout": 0.1, "outage": 1.0}, TargetError, ("no usable answer", "no answer within 0.1 s")),
        (Servers(poison={"d4": "corrupt"}), {}, HiddenStateError, ("d4", "4 times", "non-finite")),
        (Servers(poison={"d4": "refuse"}), {"outage": 2.0}, TargetError, ("d4", "nobody listens")),
        (Servers(corrupt_share=0.4), {"retries": 50}, HiddenStateError, ("are unusable", "non-finite")),
    ],
    ids=["dead", "hanging", "poisoned", "deadly document", "corrupting"],
)
def test_a_used_up_budget_stops_with_the_last_error(servers: Servers, settings: dict[str, float], kind: type[FiresteelError], words: list[str]) -> None:
    with make_feed(servers, ["a", "b"], quick(**settings)) as feed, pytest.raises(kind) as e:
        keys(feed, 0, 400)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_trials_of_a_dead_endpoint_use_up_no_sample() -> None:
    servers = Servers(seconds=0.02, broken={"dead": "refuse"})
    with make_feed(servers, ["slow", "dead"], quick(retries=1, concurrency=1, backoff=0.001, backoff_max=0.002)) as feed:
        assert keys(feed, 0, 20) == wanted(0, 20)
    assert sum(endpoint == "dead" for endpoint, _ in servers.asked) > 20


def test_an_endpoint_with_a_wrong_setting_is_left_out_and_all_of_them_stop() -> None:
    servers = Servers()

    async def fetch(endpoint: str, work: object) -> object:
        if endpoint == "other":
            raise RecipeError("other serves another model")
        return await servers.fetch(endpoint, work)  # type: ignore[arg-type]

    for urls, ends in ((["good", "other"], False), (["other"], True)):
        with SampleFeed(fetch, WORKS, Roster(urls), quick(), step_tokens=STEP, check=check) as feed:  # type: ignore[arg-type]
            if ends:
                with pytest.raises(RecipeError, match="another model"):
                    keys(feed, 0, 1)
            else:
                assert keys(feed, 0, 20) == wanted(0, 20)


def test_endpoints_come_and_go_while_training_runs(tmp_path: Path) -> None:
    file, servers = tmp_path / "run" / "endpoints.txt", Servers()
    with make_feed(servers, Roster(["http://a"], file), quick(outage=2.0)) as feed:
        assert read_urls(file) == ["http://a"]
        keys(feed, 0, 5)
        edit(file, "add", "http://b/")
        edit(file, "remove", "http://a")
        time.sleep(1.5)
        keys(feed, 5, 10)  # what was under way at the old one may still come from there
        del servers.asked[:]
        keys(feed, 15, 10)
        assert {e for e, _ in servers.asked} == {"http://b"}
        file.write_text("")
        time.sleep(1.5)
        with pytest.raises(TargetError, match="names no endpoint"):
            keys(feed, 25, 40)
    assert read_status(file.parent) == {}
    with pytest.raises(RecipeError, match="not the URL"):
        edit(file, "add", "b:8000")
    with pytest.raises(RecipeError, match="is not in"):
        edit(file, "remove", "http://c")


def test_nothing_is_fetched_beyond_the_end_of_a_run() -> None:
    servers = Servers()
    with make_feed(servers, ["a"]) as feed:
        feed.stop = 4
        keys(feed, 0, 4)
        time.sleep(0.05)
        assert sorted(k for _, k in servers.asked) == sorted(wanted(0, 4))
        assert keys(feed, 4, 2) == wanted(4, 2), "the end was a guess"


def test_closing_ends_the_thread_with_requests_under_way() -> None:
    servers = Servers(broken={"a": "hang"})
    feed = make_feed(servers, ["a", "b"])
    keys(feed, 0, 1)
    started = time.monotonic()
    feed.close()
    feed.close()
    assert time.monotonic() - started < 10
    assert not any(t.name == "feed" for t in threading.enumerate())
    assert sum(servers.flying.values()) == 0


def test_closing_a_feed_that_never_began_closes_what_it_needs() -> None:
    closed: list[str] = []

    async def finish() -> None:
        closed.append("client")

    for begun in (False, True):
        feed = SampleFeed(Servers().fetch, WORKS, Roster(["a"]), quick(), step_tokens=STEP, check=check, finish=finish)
        if begun:
            keys(feed, 0, 1)
        feed.close()
        feed.close()
        assert closed == ["client"]
        closed.clear()


def test_a_mistake_in_the_check_reaches_training() -> None:
    def broken(sample: object) -> None:
        raise ZeroDivisionError("a bug")

    feed = SampleFeed(Servers().fetch, WORKS, Roster(["a"]), quick(outage=0.3), step_tokens=STEP, check=broken)
    with feed, pytest.raises(TargetError, match="a bug"):
        keys(feed, 0, 1)
