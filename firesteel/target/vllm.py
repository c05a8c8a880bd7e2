"""The vllm engine: asks a server for one token after a document, and takes the hidden states that its connector leaves in the exchange.

What goes wrong is told apart as `endpoints.pool` describes: `RecipeError` where this server will never give the right states (another
model, other layers, no connector), `HiddenStateError` where one sample is not usable, `TargetError` or `ResourceError` where the
server or the store failed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import torch

from firesteel.errors import HiddenStateError, RecipeError, ResourceError, TargetError
from firesteel.hidden.codec import CodecName, decode_states
from firesteel.hidden.exchange import Exchange
from firesteel.hidden.sample import HiddenSample, check_sample, predictable_positions
from firesteel.hidden.wire import FIELD, PROTOCOL, Wanted, to_ranges, unpack
from firesteel.target.head import TargetHead

_START = "firesteel extract-server RECIPE starts a server as this recipe needs it"
_LOG = "look at the server's log"


class VllmStates:
    """A client of servers that hand out hidden states. Belongs to the event loop that first uses it.

    Args:
        exchange: where the servers leave samples.
        layer_ids: captured layers.
        num_layers: of the target.
        target: its fingerprint, which samples get.
        weights: digest of its files; None where they have none to compare.
        codec: precision of the states on their way.
        timeout: seconds for one sample.
        head: to compute the normalisers with; without it samples have none.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        layer_ids: tuple[int, ...],
        num_layers: int,
        target: str,
        weights: str | None,
        codec: CodecName,
        timeout: float,
        head: TargetHead | None = None,
    ) -> None:
        self.exchange, self.layer_ids, self.num_layers, self.target, self.weights = exchange, layer_ids, num_layers, target, weights
        self.codec, self.timeout, self.head = codec, timeout, head
        self._models: dict[str, str] = {}
        # The pool of endpoints bounds what is under way; a proxy would stand between machines of one cluster.
        # A connection for each request: servers close kept ones after seconds (vLLM after five), and whoever asks in that moment gets no answer.
        self._http = httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), trust_env=False)

    async def fetch(self, endpoint: str, token_ids: Sequence[int], loss_mask: Sequence[bool], key: str) -> HiddenSample:
        """The states of a document, checked. Nothing of it is left in the exchange.

        Args:
            endpoint: http://host:port.
            token_ids: T ids.
            loss_mask: T booleans.
            key: names the sample.

        Raises:
            RecipeError: this server serves another model or other layers, has no connector, or refuses the request.
            HiddenStateError: what came is damaged, short, of other tokens, not finite, or was not captured.
            TargetError: the server cannot be reached, fails, or its states do not arrive in time.
            ResourceError: there is no room in the exchange.
        """
        mask = torch.tensor(list(loss_mask), dtype=torch.bool)
        handle = f"{key[:150]}-{secrets.token_hex(6)}"  # fresh each time: a late writer of an earlier try must not meet this one
        wanted = Wanted(handle, self.layer_ids, to_ranges(predictable_positions(mask)), self.codec)
        deadline = asyncio.get_running_loop().time() + self.timeout
        try:
            answer = await self._complete(endpoint, token_ids, wanted.to_params())
            self._check_server(endpoint, answer)
            data = await self._wait(endpoint, handle, deadline)
            return await asyncio.to_thread(self._open, data, handle, token_ids, mask, key)
        finally:
            await asyncio.to_thread(self.exchange.remove, handle)

    async def logprobs(self, endpoint: str, token_ids: Sequence[int], top: int = 20) -> list[dict[int, float]]:
        """The server's own log-probabilities of the likeliest tokens; entry p is its distribution of token p + 1. T - 1 entries.

        Raises:
            RecipeError, TargetError: as `fetch`.
        """
        body = await self._post(endpoint, {"prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": top})
        found = body["choices"][0].get("prompt_logprobs")
        if found is None or len(found) != len(token_ids):
            raise TargetError(f"{endpoint} gives no log-probabilities of a prompt", mend=_LOG)
        return [{int(token): float(entry["logprob"]) for token, entry in (row or {}).items()} for row in found[1:]]

    async def close(self) -> None:
        await self._http.aclose()

    async def _complete(self, endpoint: str, token_ids: Sequence[int], params: Mapping[str, Any]) -> Mapping[str, Any]:
        body = await self._post(endpoint, {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "kv_transfer_params": params})
        answer = (body.get("kv_transfer_params") or {}).get(FIELD)
        if answer is None:
            raise RecipeError(f"the server at {endpoint} hands out no hidden states: it runs without Firesteel's connector", mend=_START)
        return answer

    async def _post(self, endpoint: str, body: dict[str, Any]) -> Any:
        if endpoint not in self._models:
            listed = await self._send(endpoint, "GET", "/v1/models", None)
            self._models[endpoint] = str(listed["data"][0]["id"])
        return await self._send(endpoint, "POST", "/v1/completions", {"model": self._models[endpoint], **body})

    async def _send(self, endpoint: str, method: str, path: str, body: Any) -> Any:
        try:
            response = await self._http.request(method, endpoint.rstrip("/") + path, json=body)
        except httpx.TimeoutException:
            raise TargetError(f"the server at {endpoint} gave no answer within {self.timeout:g} s", mend=_LOG) from None
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise TargetError(f"the server at {endpoint} cannot be reached: {str(e) or type(e).__name__}", mend=_START) from None
        if response.status_code >= 500 or response.status_code == 429:
            raise TargetError(f"the server at {endpoint} failed: {response.status_code} {_reason(response)}", mend=_LOG)
        if response.status_code >= 400:
            raise RecipeError(f"the server at {endpoint} refuses: {response.status_code} {_reason(response)}", mend=_START)
        try:
            return response.json()
        except ValueError:
            raise TargetError(f"the server at {endpoint} answered what is not JSON: {response.text[:80]!r}", mend="is it a vLLM server?") from None

    def _check_server(self, endpoint: str, answer: Mapping[str, Any]) -> None:
        if answer.get("protocol") != PROTOCOL:
            raise RecipeError(f"the server at {endpoint} speaks protocol {answer.get('protocol')}, this Firesteel {PROTOCOL}", mend=_START)
        if answer["weights"] is not None and self.weights is not None and answer["weights"] != self.weights:
            raise RecipeError(
                f"the server at {endpoint} serves other weights ({answer['model']}, digest {answer['weights']}) than target.model has ({self.weights})",
                mend="serve the same model and revision: " + _START,
            )
        if answer["num_layers"] != self.num_layers:
            raise RecipeError(f"the model at {endpoint} ({answer['model']}) has {answer['num_layers']} layers, the target {self.num_layers}", mend=_START)
        if answer["error"] is not None and answer["refused"]:
            raise RecipeError(f"the server at {endpoint}: {answer['error']}", mend=_START)
        if answer["error"] is not None:
            raise HiddenStateError(f"the server at {endpoint}: {answer['error']}", mend=_LOG)

    async def _wait(self, endpoint: str, handle: str, deadline: float) -> bytes:
        pause, loop = 0.002, asyncio.get_running_loop()
        while (found := await asyncio.to_thread(self.exchange.take, handle)) is None:
            if loop.time() > deadline:
                raise TargetError(
                    f"{endpoint} answered, but no states of {handle} came within {self.timeout:g} s",
                    mend="do server and trainer have the same hidden.exchange folder, or the same Mooncake master? Then look at the server's log",
                )
            await asyncio.sleep(pause)
            pause = min(1.25 * pause, 0.1)  # what lies there is seen a quarter of the time later, at most
        marker, data = found
        if marker.error is not None:
            kind = ResourceError if marker.again else HiddenStateError
            raise kind(f"{endpoint} could not hand over {handle}: {marker.error}")
        if len(data) != marker.size:
            raise HiddenStateError(f"sample {handle} has {len(data)} bytes, its marker says {marker.size}", mend=_LOG)
        return data

    def _open(self, data: bytes, handle: str, token_ids: Sequence[int], mask: torch.Tensor, key: str) -> HiddenSample:
        tensors, header = unpack(data, handle)
        ids = torch.tensor(list(token_ids), dtype=torch.int64)
        if not torch.equal(tensors["token_ids"], ids):
            raise HiddenStateError(f"sample {key}: states of other tokens came ({len(tensors['token_ids'])} of them, {len(ids)} were asked about)", mend=_LOG)
        if self.weights is not None and header["target"] not in ("", self.weights):
            raise HiddenStateError(f"sample {key} was captured from weights {header['target']}, not {self.weights}", mend=_START)
        if header["layer_ids"] != str(list(self.layer_ids)):
            raise HiddenStateError(f"sample {key} has layers {header['layer_ids']}, {list(self.layer_ids)} were asked for", mend=_LOG)
        last = decode_states(tensors["last"], tensors.get("last_scale"))
        sample = HiddenSample(
            key=key,
            token_ids=ids,
            loss_mask=mask,
            aux=decode_states(tensors["aux"], tensors.get("aux_scale")),
            last=last,
            last_positions=tensors["last_positions"],
            layer_ids=self.layer_ids,
            target=self.target,
            last_lognorm=None if self.head is None else self.head.logits(last.to(self.head.weight.device)).logsumexp(-1).cpu(),
        )
        check_sample(sample, layer_ids=self.layer_ids, target=self.target)
        return sample


def _reason(response: httpx.Response) -> str:
    try:
        said = response.json()
        return str(said.get("error", said).get("message", said))[:300]
    except (ValueError, AttributeError):
        return response.text[:300]
