"""The feed over real HTTP: a server with a rate, killed and started again, out of order, corrupting; several clients at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from feed_cases import check, make_sample, make_works, quick
from sample_client import HttpSamples
from sample_server import SampleServer

from firesteel.endpoints.roster import Roster
from firesteel.errors import TargetError
from firesteel.hidden.feed import SampleFeed
from firesteel.hidden.stores import DiskStore

WORKS = make_works([20 + i % 7 for i in range(24)])


class Running:
    """A fake server in a thread."""

    def __init__(self, folder: Path, *, rate: float = 0.0, corrupt: float = 0.0) -> None:
        self.fake = SampleServer(folder, rate=rate, corrupt=corrupt)
        self.port = 0
        self.start()

    def start(self) -> None:
        ready = threading.Event()

        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.end = asyncio.Event()
            self.port = await self.fake.start(self.port)
            ready.set()
            await self.end.wait()
            self.fake.server.close()

        self.thread = threading.Thread(target=lambda: asyncio.run(main()))
        self.thread.start()
        ready.wait()

    def kill(self) -> None:
        self.loop.call_soon_threadsafe(self.end.set)
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = DiskStore(tmp_path / "samples", "fp32")
    for work in WORKS:
        store.put(make_sample(work))
    return store.folder


@pytest.fixture
def servers(folder: Path) -> Iterator[list[Running]]:
    running = [Running(folder, rate=4000), Running(folder, corrupt=0.1)]
    yield running
    for r in running:
        if r.thread.is_alive():
            r.kill()


def test_servers_that_die_fail_and_corrupt_change_nothing_about_the_batches(servers: list[Running]) -> None:
    client = HttpSamples()
    feed = SampleFeed(client.fetch, WORKS, Roster([s.url for s in servers]), quick(bad_share=0.5, retries=8), step_tokens=60, check=check, finish=client.finish)
    with feed:
        for number in range(48):
            if number == 8:
                servers[0].kill()
            if number == 16:
                servers[0].start()
            if number in (24, 32):
                servers[1].fake.status = 500 if number == 24 else 200
            for sample, i in zip(feed.take(number, lambda b: [b % 24, (b + 1) % 24]), [number % 24, (number + 1) % 24], strict=True):
                assert sample.aux.equal(make_sample(WORKS[i]).aux)
        counts = feed.report()
    assert counts["feed_faults"] > 0
    assert counts["feed_bad"] > 0
    assert counts["feed_answers"] >= 96


@pytest.mark.parametrize("count", [1, 2])
def test_a_rate_bounds_the_speed_and_servers_share_the_work(folder: Path, count: int) -> None:
    running = [Running(folder, rate=2000) for _ in range(count)]
    client = HttpSamples()
    with SampleFeed(client.fetch, WORKS, Roster([r.url for r in running]), quick(timeout=5), step_tokens=60, check=check, finish=client.finish) as feed:
        feed.stop = 24
        started = time.monotonic()
        for number in range(24):
            feed.take(number, lambda b: [b])
        seconds = time.monotonic() - started
    for r in running:
        r.kill()
    assert seconds >= sum(len(w.token_ids) for w in WORKS) / 2000 / count
    assert min(r.fake.served for r in running) >= 24 // count - 6


def test_a_server_that_is_out_of_order_is_named(servers: list[Running]) -> None:
    for s in servers:
        s.fake.status = 503
    client = HttpSamples()
    feed = SampleFeed(client.fetch, WORKS, Roster([servers[0].url]), quick(outage=6.0), step_tokens=60, check=check, finish=client.finish)
    with feed, pytest.raises(TargetError, match="503") as e:
        feed.take(0, lambda b: [b])
    assert servers[0].url in str(e.value)
