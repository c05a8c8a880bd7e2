"""Clients of the fake servers: samples over HTTP (sample_server.py), or out of an exchange, as of vLLM servers (states_server.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
from safetensors import SafetensorError
from safetensors.torch import load

from firesteel.errors import HiddenStateError
from firesteel.hidden.codec import decode_sample, verify
from firesteel.hidden.exchange import open_exchange
from firesteel.hidden.feed import Work
from firesteel.hidden.sample import HiddenSample
from firesteel.target.vllm import VllmStates


class HttpSamples:
    """`fetch` and `finish` of a feed."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, endpoint: str, work: Work) -> HiddenSample:
        if self._client is None:  # made in the feed's own loop
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        answer = await self._client.post(f"{endpoint}/sample", json={"key": work.key, "tokens": len(work.token_ids)})
        answer.raise_for_status()
        return read_sample(answer.content, endpoint)

    async def finish(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def read_sample(data: bytes, where: str) -> HiddenSample:
    """The bytes of a `DiskStore`'s file as a sample."""
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])["__metadata__"]
        tensors = load(data)
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as e:
        raise HiddenStateError(f"what {where} sent is no file of hidden states: {e}") from None
    verify(tensors, header, where)
    return decode_sample(tensors, header)


class ExchangeSamples:
    """The same by the trainer's own client of vLLM servers; samples come out of an exchange.

    Args:
        config: of the exchange, as `open_exchange` takes it.
        layer_ids, num_layers, target: of the samples.
        timeout: seconds for one sample.
    """

    def __init__(self, config: Mapping[str, Any], *, layer_ids: tuple[int, ...], num_layers: int, target: str, timeout: float) -> None:
        exchange = open_exchange(config)
        self._states = VllmStates(exchange, layer_ids=layer_ids, num_layers=num_layers, target=target, weights=None, codec="bf16", timeout=timeout)

    async def fetch(self, endpoint: str, work: Work) -> HiddenSample:
        return await self._states.fetch(endpoint, work.token_ids, work.loss_mask, work.key)

    async def finish(self) -> None:
        await self._states.close()
        self._states.exchange.close()
