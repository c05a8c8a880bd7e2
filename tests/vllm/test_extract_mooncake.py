"""The connector in a real vLLM (CPU build) with tensor parallelism, through Mooncake over TCP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from extract_cases import document, truth
from extract_running import PYTHON, Running, need_vllm, run, running
from ports import free_port

from firesteel.errors import HiddenStateError, ResourceError
from firesteel.hidden.exchange import Marker, MooncakeExchange, open_exchange
from firesteel.hidden.mooncake import MooncakeSettings, MooncakeStore
from firesteel.hidden.sample import HiddenSample
from firesteel.target.server import exchange_config
from firesteel.target.vllm import VllmStates

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    need_vllm()
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed here: pip install 'firesteel[mooncake]'", exc_type=ImportError)
    if not (PYTHON.parent / "mooncake_master").is_file():
        pytest.skip("Mooncake is not installed in vLLM's environment")
    torch.set_num_threads(1)
    mooncake = {"port": free_port(2), "segment_gb": 1 / 64, "buffer_gb": 1 / 64}
    hidden = {"transport": "mooncake", "mooncake": mooncake}
    with running(tmp_path_factory.mktemp("mooncake"), hidden, ["--max-num-batched-tokens", "96"], devices=2) as found:
        yield found


@pytest.fixture(scope="module")
def exchange(server: Running) -> Iterator[MooncakeExchange]:
    found = open_exchange(exchange_config(server.recipe.hidden, server.folder, segment=False))
    assert isinstance(found, MooncakeExchange)
    yield found
    found.close()


def fetch_all(states: VllmStates, url: str, documents: list[tuple[list[int], list[bool]]]) -> list[HiddenSample]:
    async def job(s: VllmStates) -> list[HiddenSample]:
        return list(await asyncio.gather(*(s.fetch(url, ids, mask, f"d{i}") for i, (ids, mask) in enumerate(documents))))

    return run(states, job)


@pytest.mark.parametrize(("codec", "bound"), [("fp32", 1e-5), ("fp8", 2.0**-4)])
def test_states_equal_transformers_and_leave_nothing(server: Running, exchange: MooncakeExchange, codec: str, bound: float) -> None:
    class Noting(MooncakeExchange):
        """The same store; remembers the handles that were read."""

        def __init__(self) -> None:
            self.store, self.seen = exchange.store, list[str]()

        def take(self, handle: str) -> tuple[Marker, bytes] | None:
            found = super().take(handle)
            if found is not None:
                self.seen.append(handle)
            return found

    noting = Noting()
    # 120 documents of up to 371 tokens are more than the segment of 16 MiB holds at once in fp32: room is given back.
    documents = [document(20 + 9 * i, i) for i in range(40)] * (3 if codec == "fp32" else 1)
    for sample in fetch_all(server.client(noting, codec=codec), server.url, documents):
        aux, last = truth(server.model, sample.token_ids.tolist())
        assert float((sample.aux - aux).norm() / aux.norm()) < bound
        assert float((sample.last - last[sample.last_positions]).norm() / last.norm()) < bound
    assert len(noting.seen) == len(documents)
    assert not [h for h in noting.seen if exchange.store.get(f"{h}/states") or exchange.look(h)]


def test_a_full_segment_is_said_and_passes(server: Running, exchange: MooncakeExchange) -> None:
    m = server.recipe.hidden.mooncake
    filler = MooncakeStore(MooncakeSettings(f"{m.address}:{m.port}", buffer=16 << 20))
    keys: list[str] = []

    def fill(size: int) -> None:
        while True:
            filler.put(f"filler-{len(keys)}", bytes(size))
            keys.append(f"filler-{len(keys)}")

    for size in (4 << 20, 1 << 20, 64 << 10):  # down to less than a sample has
        with pytest.raises(ResourceError, match="the Mooncake store is full"):
            fill(size)
    try:
        with pytest.raises(ResourceError, match="the Mooncake store is full"):
            fetch_all(server.client(exchange), server.url, [document(380, 1)])
    finally:
        for key in keys:
            filler.remove(key)
        filler.close()
    assert len(fetch_all(server.client(exchange), server.url, [document(380, 1)])[0]) == 380


def test_a_damaged_object_is_found(server: Running, exchange: MooncakeExchange) -> None:
    class Damaging(MooncakeExchange):
        def __init__(self) -> None:
            self.store = exchange.store

        def take(self, handle: str) -> tuple[Marker, bytes] | None:
            found = super().take(handle)
            if found is None:
                return None
            data = bytearray(found[1])
            data[-5] ^= 1
            return found[0], bytes(data)

    with pytest.raises(HiddenStateError, match="corrupt"):
        fetch_all(server.client(Damaging()), server.url, [document(50, 3)])
