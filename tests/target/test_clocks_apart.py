"""Server and trainer whose clocks are a day apart: leases, the client and the feed go by their own machine's seconds alone."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from states_fake import TABLE, FakeServer

from firesteel.endpoints.roster import Roster
from firesteel.errors import TargetError
from firesteel.hidden.exchange import FolderExchange, Leases
from firesteel.hidden.feed import SampleFeed, Work
from firesteel.hidden.sample import HiddenSample, check_sample
from firesteel.recipe import Feed
from firesteel.target.vllm import VllmStates

DAY = 86400.0
WORKS = [Work(f"d{i}", [(7 * i + 3 * j + 1) % 64 for j in range(10 + i % 3)], [j >= 3 for j in range(10 + i % 3)]) for i in range(8)]


class Shifted(FolderExchange):
    """Its files bear the times of the machine that wrote them."""

    def __init__(self, folder: Path, shift: float) -> None:
        super().__init__(folder)
        self.shift = shift

    def _write(self, name: str, data: bytes) -> None:
        super()._write(name, data)
        written = time.monotonic_ns() // 10**9 + 1_700_000_000 + self.shift
        os.utime(self.folder / name, (written, written))


@pytest.mark.parametrize("shift", [-DAY, DAY])
def test_nothing_depends_on_the_other_machines_clock(tmp_path: Path, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = time.time, set[bool]()

    def clock() -> float:
        """The server's threads live a day apart from all others."""
        name = threading.current_thread().name
        server = name.startswith(("Thread-", "firesteel"))
        asked.add(server)
        return real() + (shift if server else 0.0)

    monkeypatch.setattr(time, "time", clock)
    threading.Thread(target=time.time, name="Thread-probe").start()
    time.time()
    assert asked == {True, False}, "both clocks are told"
    settings: dict[str, Any] = {"layer_ids": (1, 2), "num_layers": 4, "target": "toy", "weights": "digest", "codec": "fp32", "timeout": 20.0}
    states = VllmStates(FolderExchange(tmp_path), **settings)

    async def fetch(endpoint: str, work: Work) -> HiddenSample:
        return await states.fetch(endpoint, work.token_ids, work.loss_mask, work.key)

    def check(sample: HiddenSample) -> None:
        check_sample(sample, layer_ids=(1, 2), target="toy")

    with FakeServer(Shifted(tmp_path, shift), faults=["", "500", "damaged"]) as server:
        feed = SampleFeed(
            fetch,
            WORKS,
            Roster([server.url]),
            Feed(timeout=20, backoff=0.01, bad_share=0.9, late_factor=None),
            step_tokens=30,
            check=check,
            finish=states.close,
        )
        started = time.monotonic()
        with feed:
            for number in range(16):
                for sample, i in zip(feed.take(number, lambda b: [b % 8, (b + 1) % 8]), [number % 8, (number + 1) % 8], strict=True):
                    assert sample.aux.equal(TABLE[torch.tensor(WORKS[i].token_ids)][:, :2])
            counts = feed.report()
        assert time.monotonic() - started < 60
    assert (counts["feed_faults"], counts["feed_bad"]) == (1, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shift", [-DAY, DAY])
def test_a_clock_that_is_set_while_a_lease_runs_neither_ends_nor_prolongs_it(tmp_path: Path, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Shifted(tmp_path, shift)
    real = time.time
    kept, short = Leases(exchange, 600.0), Leases(exchange, 0.2)
    for leases, handle in ((kept, "kept"), (short, "short")):
        exchange.put(handle, b"x")
        leases.add(handle)
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    deadline = time.monotonic() + 10
    while (tmp_path / "short.states").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept.sweep()
    assert exchange.look("kept") is not None
    for leases in (kept, short):
        leases.close(grace=0.0)


def one_sample(states: VllmStates, server: FakeServer, outage: int) -> SampleFeed:
    """A feed of the first document, which gives a server up after so many seconds."""
    return SampleFeed(
        lambda url, work: states.fetch(url, work.token_ids, work.loss_mask, work.key),
        WORKS[:1],
        Roster([server.url]),
        Feed(timeout=30, outage=outage, backoff=0.01),
        step_tokens=20,
        check=lambda sample: None,
        finish=states.close,
    )


def test_a_clock_that_leaps_ahead_is_no_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    states = VllmStates(FolderExchange(tmp_path), layer_ids=(1, 2), num_layers=4, target="toy", weights="digest", codec="fp32", timeout=20.0)
    jumps = iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: real() + DAY * next(jumps))
    with FakeServer(FolderExchange(tmp_path), faults=["500"] * 3) as server:
        feed = one_sample(states, server, outage=60)
        with feed:
            assert feed.take(0, lambda b: [0])[0].key == "d0"
        assert server.requests >= 4


def test_a_server_that_gives_nothing_is_given_up_by_ones_own_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - DAY)
    states = VllmStates(FolderExchange(tmp_path), layer_ids=(1, 2), num_layers=4, target="toy", weights="digest", codec="fp32", timeout=20.0)
    with FakeServer(FolderExchange(tmp_path), faults=["500"] * 99) as server:
        feed = one_sample(states, server, outage=1)
        started = time.monotonic()
        with feed, pytest.raises(TargetError, match="EngineCore died"):
            feed.take(0, lambda b: [0])
        assert time.monotonic() - started < 30
