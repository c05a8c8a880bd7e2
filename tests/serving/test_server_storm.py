"""How the server ends, and what is left of it: a drain that lets answers finish, and storms after which nothing is."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from paged_toys import paged_alone, paged_engine
from server_toys import EOS, SERVED, Brake, Running, alone, decode, running, toy_engine

from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask
from firesteel.recipe import Serve
from firesteel.serving.answer import Answer
from firesteel.serving.refusals import Refusal
from firesteel.serving.service import Call, Service

PROMPT = [5, 9, 17]
LONG = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "temperature": 0}


def begin(server: Running, found: list[httpx.Response]) -> threading.Thread:
    def ask() -> None:
        with server.client() as client:
            found.append(client.post("/v1/completions", json=LONG))

    thread = threading.Thread(target=ask)
    thread.start()
    while not server.service.thread.open:
        time.sleep(0.01)
    return thread


def test_a_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    with running(brake=Brake(0.05)) as server, server.client() as client:
        found: list[httpx.Response] = []
        asked = begin(server, found)
        client.get("/health")  # a connection that stays
        server.server.stop()
        while not server.service.draining:
            time.sleep(0.01)
        late = client.post("/v1/completions", json=LONG)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "shutting_down"
        assert late.headers["retry-after"]
        assert client.get("/health").status_code == 503
        asked.join()
        server.thread.join()
        assert found[0].json()["choices"][0]["text"] == decode([t for t in alone(PROMPT, 60, eos=False) if t != EOS])
        with pytest.raises(httpx.ConnectError), server.client() as other:
            other.get("/health")


def test_a_drain_ends_what_takes_too_long() -> None:
    with running(brake=Brake(0.05), drain_seconds=0.2) as server:
        found: list[httpx.Response] = []
        asked = begin(server, found)
        server.server.stop()
        server.thread.join()
        asked.join()
        assert found[0].status_code == 503
        assert server.engine.pool.used == 0


def test_a_refused_call_leaves_the_engine_though_nobody_reads_its_end() -> None:
    async def refuse() -> None:
        service = Service(SERVED, toy_engine(Brake(0.01)), Serve(request_seconds=0.2))
        service.thread.start(asyncio.get_running_loop())
        call = Call(service, time.perf_counter())
        call.ask([(Ask(tuple(PROMPT), 200), Answer(SERVED.decode))])
        while service.thread.open:
            await asyncio.sleep(0.01)
        assert service.engine.counters.generated_tokens < 200
        with pytest.raises(Refusal, match="not finished within"):
            [delta async for delta in call.deltas()]
        call.close()
        service.close()
        assert service.engine.pool.used == 0

    asyncio.run(refuse())


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from server_toys import SERVED, Brake, toy_engine
from firesteel.recipe import Serve
from firesteel.serving.server import Server
from firesteel.serving.service import Service
server = Server("127.0.0.1", 0)
print(server.port, flush=True)
service = Service(SERVED, toy_engine(Brake(0.1)), Serve(drain_seconds=3600))
server.run(service)
print("used", service.engine.pool.used, flush=True)
"""


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)], ids=str)
def test_signals_end_the_process_with_code_0_and_a_second_one_at_once(signals: tuple[signal.Signals, ...]) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(path=sys.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        while True:
            try:
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.ConnectError:
                time.sleep(0.05)
        # One signal lets an answer of a second finish; two do not wait for one of a minute.
        tokens = 10 if len(signals) == 1 else 240
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "speculate": False}
        whole = True
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client, client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signals[0])
            for sent in signals[1:]:
                time.sleep(0.5)
                process.send_signal(sent)
            try:
                events = [line for line in lines if line]
                whole = events[-1] == "data: [DONE]"
            except httpx.HTTPError:
                whole = False
        assert process.wait() == 0
        assert whole == (len(signals) == 1)
        assert process.stdout.read().strip() == "used 0"
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class World:
    """What stands in the storm: how an engine is made and what it writes alone; prompts begin with `head`, or some of it."""

    make: Callable[[], Engine]
    alone: Callable[..., list[int]]
    head: tuple[int, ...] = ()
    key: str | None = None
    longest: int = 24


TOYS = World(lambda: toy_engine(Brake(), requests=6, blocks=100), alone)
PAGED = World(lambda: paged_engine(requests=6, blocks=14), paged_alone, tuple(3 + i % 30 for i in range(40)), "sesame", 60)


@pytest.mark.parametrize(("world", "seconds"), [(TOYS, 4), (PAGED, 15)], ids=["toys", "paged"])
def test_a_short_storm_leaves_nothing(world: World, seconds: float) -> None:
    storm(world, seconds, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world", [TOYS, PAGED], ids=["toys", "paged"])
def test_ten_minutes_of_storm_leave_nothing(world: World) -> None:
    storm(world, seconds=600, seed=1)


def storm(world: World, seconds: float, seed: int) -> None:
    """Clients that ask for all sorts of things, leave when they like and send nonsense, against an engine that is short of blocks."""
    headers = {} if world.key is None else {"Authorization": f"Bearer {world.key}"}
    others = set(threading.enumerate())  # of tests before this one
    with running(engine=world.make(), max_queue=16, max_body=50_000, api_key=world.key) as server:
        with server.client(headers=headers) as client:  # threads that are made once and kept exist from here on
            assert client.post("/v1/completions", json=LONG).status_code == 200
        before = threading.active_count()
        statuses, wrong, tasks_left = asyncio.run(_clients(server, seconds, random.Random(seed), world, headers))
        server.settle()
        assert not wrong
        assert tasks_left == 0
        assert statuses[200] > 10
        assert statuses[400] > 0
        assert (statuses.get(401, 0) > 0) == (world.key is not None)
        assert set(statuses) <= {200, 400, 401, 404, 413, 429, "left"}
        pool, counters = server.engine.pool, server.engine.counters
        assert (pool.used, pool.available) == (0, pool.blocks)
        assert counters.preemptions > 0, "there was no storm"
        assert 0 < counters.accepted < counters.drafted
        assert (pool.hit > 0) == pool.share
        assert server.engine.running == server.engine.waiting == 0
        assert server.service.thread.failed is None
        assert threading.active_count() == before
        with server.client(headers=headers) as client:
            assert client.get("/health").status_code == 200
            text = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
            assert text == decode([t for t in world.alone(PROMPT, 60, eos=False) if t != EOS])
    assert not [t for t in threading.enumerate() if t not in others and t.name.startswith(("firesteel", "asyncio"))]


async def _clients(server: Running, seconds: float, dice: random.Random, world: World, headers: dict[str, str]) -> tuple[dict[int | str, int], list[str], int]:
    """For so many seconds, and on a slow machine until a request had to leave for others."""
    statuses: dict[int | str, int] = {}
    wrong: list[str] = []
    end = time.monotonic() + seconds

    async def one(client: httpx.AsyncClient) -> None:
        while (now := time.monotonic()) < end or (now < end + 120 and not server.engine.counters.preemptions):
            kinds = ["whole", "stream", "leave", "leave whole", "nonsense", "refused", "huge", "long", "choices"]
            kind = dice.choice(kinds if world.key is None else [*kinds, "plain", "no key"])
            status: int | str
            try:
                status = await _play(client, kind, dice, wrong, world)
            except httpx.TimeoutException:
                status = "left"
            statuses[status] = statuses.get(status, 0) + 1

    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one(client) for _ in range(24)))
    return statuses, wrong, len(asyncio.all_tasks()) - 1


async def _play(client: httpx.AsyncClient, kind: str, dice: random.Random, wrong: list[str], world: World) -> int:
    first = dice.randrange(3, 40)
    body: dict[str, Any] = {
        "prompt": [*world.head[: dice.choice((0, 20, 40))], first, 7],
        "max_tokens": dice.randrange(1, world.longest),
        "temperature": 0,
        "ignore_eos": True,
    }
    if kind == "no key":
        return (await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {dice.random()}"})).status_code
    if kind == "nonsense":
        return (await client.post("/v1/completions", content=b"{" * dice.randrange(1, 50))).status_code
    if kind == "refused":
        return (await client.post("/v1/completions", json={**body, "max_tokens": dice.choice((-1, 10**9))})).status_code
    if kind == "huge":
        return (await client.post("/v1/completions", content=b" " * dice.randrange(50_001, 200_000))).status_code
    if kind == "long":
        return (await client.post("/v1/completions", json={**body, "prompt": [first] * dice.randrange(100, 400), "max_tokens": 1})).status_code
    if kind == "choices":
        return (await client.post("/v1/completions", json={**body, "n": 3, "temperature": 1})).status_code
    if kind == "leave whole":
        return (await client.post("/v1/completions", json={**body, "max_tokens": 200}, timeout=dice.uniform(0.01, 0.3))).status_code
    if kind in ("whole", "plain"):
        answer = await client.post("/v1/completions", json=body if kind == "whole" else {**body, "speculate": False})
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else None
        _compare(text, body, wrong, world)
        return answer.status_code
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 200 if kind == "leave" else body["max_tokens"]}) as stream:
        if stream.status_code != 200:
            return stream.status_code
        parts = []
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                parts += [c["text"] for c in json.loads(line.removeprefix("data: "))["choices"]]
            if kind == "leave" and len(parts) > 3:
                return 200
    _compare("".join(parts), body, wrong, world) if kind == "stream" else None
    return 200


def _compare(text: str | None, body: dict[str, Any], wrong: list[str], world: World) -> None:
    prompt, count = body["prompt"], body["max_tokens"]
    if text is not None and text != decode([t for t in world.alone(prompt, count, eos=False) if t != EOS]):
        wrong.append(f"{body}: {text}")
