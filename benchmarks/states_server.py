"""Stands for a vLLM server with Firesteel's connector: everything from the request to the exchange is the real thing, but for the target.

    python states_server.py PORT FOLDER --exchange JSON [--rate TOKENS_PER_SECOND] [--corrupt SHARE] [--seed N]

`POST /v1/completions` with a document's tokens: its states are read from FOLDER (a `DiskStore`; the handle begins with the key), put into a cache as vLLM
has one, and handed over by the connector's own writer, in Mooncake or a folder, while the client is answered. A share of what is put has a byte flipped.
`GET /v1/models` names the model."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import torch
from feed_job import LAYERS, NUM_LAYERS, TARGET
from sample_server import SampleServer
from torch import Tensor

from firesteel.hidden.exchange import Exchange, Marker, open_exchange
from firesteel.hidden.sample import HiddenSample
from firesteel.hidden.stores import DiskStore
from firesteel.hidden.wire import FIELD, PROTOCOL, read_wanted
from firesteel.inside_vllm.plan import Save
from firesteel.inside_vllm.writer import Writer

BLOCK = 16


class Corrupting:
    """An exchange in which a share of the samples has a byte flipped on its way."""

    def __init__(self, inner: Exchange, share: float, seed: int) -> None:
        self._inner, self._share, self._chance = inner, share, random.Random(seed)

    def put(self, handle: str, data: bytes) -> None:
        if self._chance.random() < self._share:
            damaged = bytearray(data)
            damaged[len(data) // 2] ^= 1
            data = bytes(damaged)
        self._inner.put(handle, data)

    def fail(self, handle: str, error: str, *, again: bool) -> None:
        self._inner.fail(handle, error, again=again)

    def look(self, handle: str) -> Marker | None:
        return self._inner.look(handle)

    def get(self, handle: str) -> bytes:
        return self._inner.get(handle)

    def take(self, handle: str) -> tuple[Marker, bytes] | None:
        return self._inner.take(handle)

    def remove(self, handle: str) -> None:
        self._inner.remove(handle)

    def close(self) -> None:
        self._inner.close()


class StatesServer(SampleServer):
    """Answers as vLLM does with the connector; one prefill at a time."""

    def __init__(self, folder: Path, exchange: Exchange, *, rate: float = 0.0, corrupt: float = 0.0, seed: int = 0) -> None:
        super().__init__(folder, rate=rate)
        self.store = DiskStore(folder, "bf16")
        self.writer = Writer(Corrupting(exchange, corrupt, seed), [*LAYERS, NUM_LAYERS], NUM_LAYERS, None, lease=120.0)

    def _tell(self, head: bytes) -> bytes:
        return json.dumps({"data": [{"id": TARGET}]}).encode()

    async def _sample(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        wanted = read_wanted(asked.get("kv_transfer_params"))
        assert wanted is not None, "only states are asked for"
        async with self._turn:
            if self.rate:
                await asyncio.sleep(len(asked["prompt"]) / self.rate)
        sample = await asyncio.to_thread(self.store.get, wanted.handle.rsplit("-", 1)[0])
        cache = as_cache(sample)
        await asyncio.to_thread(self.writer.submit, Save(wanted, asked["prompt"], range(len(cache))), cache)
        self.served += 1
        answer = {"protocol": PROTOCOL, "layer_ids": [*LAYERS, NUM_LAYERS], "num_layers": NUM_LAYERS, "weights": None, "model": TARGET}
        body = {"choices": [{"text": ""}], "kv_transfer_params": {FIELD: {**answer, "error": None, "refused": False}}}
        return 200, json.dumps(body).encode()


def as_cache(sample: HiddenSample) -> Tensor:
    """A sample's states as vLLM's cache of hidden states: `[blocks, m + 1, BLOCK, d]`; the last layer's are zero where nobody asks for them."""
    tokens, layers, width = sample.aux.shape
    blocks = -(-tokens // BLOCK)
    cache = torch.zeros(blocks * BLOCK, layers + 1, width, dtype=sample.aux.dtype)
    cache[:tokens, :layers] = sample.aux
    cache[sample.last_positions, layers] = sample.last
    return cache.view(blocks, BLOCK, layers + 1, width).transpose(1, 2)


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exchange", type=json.loads, required=True, help="as open_exchange takes it, in JSON")
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--corrupt", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    torch.set_num_threads(1)
    server = StatesServer(a.folder, open_exchange(a.exchange), rate=a.rate, corrupt=a.corrupt, seed=a.seed)
    print(await server.start(a.port), flush=True)
    await server.server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
