"""The vllm engine's client against a fake server: what it gives, and how each kind of trouble is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from states_fake import IDS, TABLE, FakeServer

sys.path.insert(0, str(Path(__file__).parents[1] / "hidden"))
from mooncake_fake import install

from firesteel.endpoints.pool import Pool
from firesteel.endpoints.roster import Roster
from firesteel.errors import FiresteelError, HiddenStateError, RecipeError, ResourceError, TargetError
from firesteel.hidden.exchange import FolderExchange, MooncakeExchange
from firesteel.hidden.mooncake import MooncakeSettings, check_master
from firesteel.hidden.sample import HiddenSample
from firesteel.inside_vllm import writer as writers
from firesteel.recipe import Endpoints
from firesteel.target.vllm import VllmStates

TOKENS = [3, 9, 27, 17, 51, 25, 11, 33, 35, 41]
MASK = [False, False, False, True, True, True, False, False, True, True]


def client(folder: Path, **changes: Any) -> VllmStates:
    settings: dict[str, Any] = {"layer_ids": (1, 2), "num_layers": 4, "target": "fingerprint", "weights": "digest", "codec": "fp32", "timeout": 5.0}
    return VllmStates(FolderExchange(folder), **{**settings, **changes})


def run(states: VllmStates, job: Callable[[VllmStates], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            return await job(states)
        finally:
            await states.close()

    return asyncio.run(main())


def fetch(states: VllmStates, url: str) -> HiddenSample:
    return run(states, lambda s: s.fetch(url, TOKENS, MASK, "doc"))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp8"])
def test_a_sample_comes_whole_and_nothing_of_it_stays(tmp_path: Path, codec: str) -> None:
    with FakeServer(FolderExchange(tmp_path)) as server:
        sample = fetch(client(tmp_path, codec=codec), server.url)
    wanted = TABLE[torch.tensor(TOKENS)]
    bound = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-3}[codec] * float(wanted.abs().max())
    assert sample.last_positions.tolist() == [2, 3, 4, 7, 8]
    assert float((sample.aux.float() - wanted[:, :2]).abs().max()) <= bound
    assert float((sample.last.float() - wanted[[2, 3, 4, 7, 8], IDS.index(4)]).abs().max()) <= bound
    assert (sample.key, sample.target, sample.layer_ids, sample.last_lognorm) == ("doc", "fingerprint", (1, 2), None)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_closes_kept_connections_is_no_trouble(tmp_path: Path) -> None:
    """As vLLM does after five seconds, also while the next request is under way: whoever sends it there is told nothing but that it was reset."""
    bodies = {"/v1/models": {"data": [{"id": "tiny"}]}, "/v1/completions": {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -0.5}}]}]}}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "content-length: " in head:
            await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        body = json.dumps(bodies[head.split()[1]]).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: keep-alive\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        with contextlib.suppress(ConnectionError):
            await reader.read(1)  # the next request, not answered
        writer.transport.abort()

    async def job(states: VllmStates) -> list[dict[int, float]]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await states.logprobs("http://{}:{}".format(*server.sockets[0].getsockname()), [1, 2])

    assert run(client(tmp_path), job) == [{7: -0.5}]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("500", TargetError, "failed: 500 EngineCore died"),
        ("hang", TargetError, "gave no answer within 0.5 s"),
        ("silent", TargetError, "no states of doc-.* came within 0.5 s"),
        ("not json", TargetError, "not JSON"),
        ("400", RecipeError, "refuses: 400 maximum context length"),
        ("no connector", RecipeError, "without Firesteel's connector"),
        ("short", HiddenStateError, "8 of them, 10 were asked about"),
        ("other", HiddenStateError, "states of other tokens"),
        ("aborted", HiddenStateError, "ended before its prefill"),
        ("overflow", HiddenStateError, "not finite"),
        ("zeros", HiddenStateError, "only zeros"),
        ("damaged", HiddenStateError, "corrupt"),
    ],
)
def test_each_trouble_has_its_kind_and_words(tmp_path: Path, fault: str, kind: type[FiresteelError], words: str) -> None:
    with FakeServer(FolderExchange(tmp_path), faults=[fault]) as server, pytest.raises(kind, match=words) as e:
        fetch(client(tmp_path, timeout=0.5 if fault in ("hang", "silent") else 5.0, codec="fp8"), server.url)
    assert server.url in str(e.value) or "sample doc" in str(e.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("server", "ours", "words"),
    [
        ({"weights": "others"}, {}, "serves other weights .fake/model, digest others. than target.model has .digest."),
        ({}, {"layer_ids": (1, 3)}, "layer 3 is wanted, the server of fake/model captures .1, 2, 4."),
        ({"num_layers": 2, "weights": None}, {}, "has 2 layers, the target 4"),
    ],
)
def test_a_server_of_another_model_or_other_layers_is_refused_for_good(tmp_path: Path, server: dict[str, Any], ours: dict[str, Any], words: str) -> None:
    with FakeServer(FolderExchange(tmp_path), **server) as fake, pytest.raises(RecipeError, match=words):
        fetch(client(tmp_path, **ours), fake.url)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot be reached"):
        fetch(client(tmp_path), "http://127.0.0.1:9")


def test_a_connection_that_breaks_without_a_word_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = client(tmp_path)

    async def broken(*args: object, **kwargs: object) -> None:
        raise httpx.ReadError("")

    monkeypatch.setattr(states._http, "request", broken)
    with pytest.raises(TargetError, match=r"at http://host:1 cannot be reached: ReadError"):
        fetch(states, "http://host:1")


def test_a_full_exchange_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_PATIENCE", 0.1)

    class Full(FolderExchange):
        def put(self, handle: str, data: bytes) -> None:
            raise ResourceError("the store is full")

    with FakeServer(Full(tmp_path)) as server, pytest.raises(ResourceError, match="the store is full"):
        fetch(client(tmp_path), server.url)


def test_an_unreachable_mooncake_master_is_found_at_once() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    with pytest.raises(ResourceError, match=f"no Mooncake master answers at 127.0.0.1:{free}"):
        check_master(f"127.0.0.1:{free}")
    with pytest.raises(ResourceError, match="not HOST:PORT"):
        check_master("nowhere")
    assert MooncakeSettings("a:1").segment == 0


def test_a_mooncake_address_that_the_other_machine_does_not_reach_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master tells of a marker that cannot be fetched: no reason to wait for it until the timeout."""
    fake = install(monkeypatch)
    ours = MooncakeExchange(MooncakeSettings("master:1"))
    settings: dict[str, Any] = {"layer_ids": (1, 2), "num_layers": 4, "target": "fingerprint", "weights": "digest", "codec": "fp32", "timeout": 60.0}
    with FakeServer(MooncakeExchange(MooncakeSettings("master:1", segment=1 << 20))) as server:
        assert len(run(VllmStates(ours, **settings), lambda s: s.fetch(server.url, TOKENS, MASK, "doc"))) == 10
        fake.cut = True
        started = time.monotonic()
        with pytest.raises(ResourceError, match=r"knows doc-.*/marker, but the machine that holds it") as e:
            run(VllmStates(ours, **settings), lambda s: s.fetch(server.url, TOKENS, MASK, "doc"))
    assert "hidden.mooncake.address" in str(e.value.mend)
    assert time.monotonic() - started < 20
    ours.close()


def test_retries_are_bounded_and_the_last_error_is_shown(tmp_path: Path) -> None:
    """Through the pool of endpoints, as the stage asks: passing trouble is got over, lasting trouble stops with what was last seen."""
    settings = Endpoints(timeout=5, retries=4, backoff=0.02, outage=1.0)

    async def one(states: VllmStates, url: str) -> HiddenSample:
        async def ask(endpoint: str, _: None) -> HiddenSample:
            return await states.fetch(endpoint, TOKENS, MASK, "doc")

        pool: Pool[None, HiddenSample] = Pool(ask, Roster([url]), settings, "document")
        pool.start()
        try:
            return await pool.submit(None, size=10, name="doc")
        finally:
            await pool.close()

    with FakeServer(FolderExchange(tmp_path), faults=["500", "damaged", "short", "500"]) as server:
        assert len(run(client(tmp_path), lambda s: one(s, server.url))) == 10
    with FakeServer(FolderExchange(tmp_path), faults=["500"] * 999) as server, pytest.raises(TargetError, match=r"the last error: .*500 EngineCore died"):
        run(client(tmp_path), lambda s: one(s, server.url))
    with (
        FakeServer(FolderExchange(tmp_path), faults=["damaged"] * 999) as server,
        pytest.raises(HiddenStateError, match=r"failed 5 times; the last: .*corrupt"),
    ):
        run(client(tmp_path), lambda s: one(s, server.url))
