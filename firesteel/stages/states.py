"""Hidden states from vLLM servers (`target.engine: vllm`): the client that asks them, and what the stage `hidden` takes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from firesteel.endpoints.pool import Pool
from firesteel.endpoints.roster import Roster
from firesteel.errors import HiddenStateError
from firesteel.hidden.codec import RELATIVE_ERROR
from firesteel.hidden.exchange import open_exchange
from firesteel.hidden.sample import HiddenSample
from firesteel.hidden.weights import weights_digest
from firesteel.prompts.template import Document
from firesteel.recipe import Endpoints
from firesteel.stages.line import Line
from firesteel.stages.underway import check_buffer
from firesteel.target.head import TargetHead
from firesteel.target.loading import resolve_target
from firesteel.target.server import check_length, exchange_config, server_url
from firesteel.target.vllm import VllmStates

_PROBE = 512  # tokens of a sample that a server is tried with


def servers(line: Line) -> list[str]:
    """The servers that capture: `target.endpoints`, or the one that `extract-server` starts for this recipe."""
    return list(line.recipe.target.endpoints) or [server_url(line.recipe.target)]


def open_states(line: Line) -> VllmStates:
    """A client for the line's target; its `fetch` makes one sample at one server.

    Raises:
        RecipeError: documents may be longer than a server can take, or have more states than the exchange.
        ResourceError: the exchange cannot be opened.
    """
    recipe, target = line.recipe, line.target
    check_length(recipe.hidden, target.spec.max_position_embeddings)
    check_buffer(recipe.hidden, len(line.layer_ids), target.spec.hidden_size)
    return VllmStates(
        open_exchange(exchange_config(recipe.hidden, line.folder, segment=False)),
        layer_ids=line.layer_ids,
        num_layers=target.spec.num_layers,
        target=target.spec.fingerprint,
        weights=weights_digest(resolve_target(recipe.target), recipe.target.revision),
        codec=recipe.hidden.codec,
        timeout=recipe.hidden.feed.timeout,
        head=target.head,
    )


async def leave(states: VllmStates) -> None:
    """Close a client of `open_states`, and its exchange."""
    await states.close()
    states.exchange.close()


@contextmanager
def _client(line: Line) -> Iterator[tuple[VllmStates, asyncio.Runner]]:
    """A client, and an event loop to run its work in; both end with the block."""
    states = open_states(line)
    with asyncio.Runner() as runner:
        try:
            yield states, runner
        finally:
            runner.run(leave(states))


def check_servers(line: Line) -> dict[str, float]:
    """Fetch two samples from every server; the tokens per second of the second one, by server.

    Raises:
        FiresteelError: one of them cannot be used; the message names it.
    """
    paces = {}
    length, vocab = min(line.recipe.hidden.max_length, _PROBE), line.target.spec.vocab_size
    with _client(line) as (states, runner):
        for url in servers(line):
            for first in (0, 1):  # another beginning, so that no cached prefix flatters
                started = time.perf_counter()
                runner.run(states.fetch(url, [(i + first) % vocab for i in range(length)], [True] * length, "check"))
            paces[url] = length / (time.perf_counter() - started)
    return paces


def captured(line: Line, documents: Sequence[Document]) -> Iterator[HiddenSample]:
    """Samples of documents, as they come, from all servers at once.

    Raises:
        FiresteelError: a budget of `hidden.feed` is used up; the message has the last error.
    """
    settings = Endpoints(**line.recipe.hidden.feed.model_dump(include=set(Endpoints.model_fields)))
    urls = servers(line)
    ahead = 2 * settings.concurrency * len(urls)
    with _client(line) as (states, runner):

        async def ask(url: str, document: Document) -> HiddenSample:
            return await states.fetch(url, document.token_ids, document.loss_mask, document.key)

        pool: Pool[Document, HiddenSample] = Pool(ask, Roster(urls), settings, "document")
        runner.run(_call(pool.start))
        try:
            waiting: set[asyncio.Future[HiddenSample]] = set()
            todo = iter(documents)
            while True:
                new = [d for _, d in zip(range(ahead - len(waiting)), todo, strict=False)]
                waiting |= runner.run(_call(lambda new=new: {pool.submit(d, size=len(d.token_ids), name=d.key) for d in new}))
                if not waiting:
                    return
                done, waiting = runner.run(_first(waiting))
                yield from (future.result() for future in done)
        finally:
            runner.run(pool.close())


def rounding_variation(head: TargetHead, last: torch.Tensor, probabilities: torch.Tensor, codec: str) -> float:
    """What rounding to a codec may do to the target's probabilities: the mean total variation after each state changed by a random part of the most
    that rounding takes of it. fp8 alone takes 0.02 of some targets, so no fixed tolerance tells rounding from a fault.

    Args:
        last: `[S, d]` states before the final norm.
        probabilities: `[S, V]`, what the head makes of them.
    """
    last = last.float()
    noise = torch.rand(last.shape, generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1).mul_(RELATIVE_ERROR[codec])
    after = head.logits((last + last * noise).to(head.weight.device)).softmax(-1)
    return float(0.5 * (probabilities.to(after.device) - after).abs().sum(-1).mean())


@torch.inference_mode()
def check_served_logits(line: Line, samples: Sequence[HiddenSample], tolerance: float) -> float:
    """Recompute the target's probabilities from states with the local head, and compare them with the server's own; the worst mean total variation.

    The server reports its likeliest tokens; the rest counts as one. Wrong layers, a norm too many, a soft-cap forgotten show here.

    Raises:
        HiddenStateError: they differ by more than `tolerance` and what rounding explains.
    """
    url, head, codec = servers(line)[0], line.target.head, line.recipe.hidden.codec
    worst = 0.0
    with _client(line) as (states, runner):
        for sample in samples:
            said = runner.run(states.logprobs(url, sample.token_ids.tolist()))
            ours = head.logits(sample.last.to(line.target.device)).softmax(-1).cpu()
            distance = sum(_variation(said[p], row) for p, row in zip(sample.last_positions.tolist(), ours, strict=True)) / len(ours)
            worst = max(worst, distance)
            if distance <= tolerance:
                continue
            allowed = tolerance + rounding_variation(head, sample.last, ours, codec)
            if not distance <= allowed:
                raise HiddenStateError(
                    f"document {sample.key}: probabilities recomputed from its states differ from those of {url} by {distance:.4f} (total variation), "
                    f"hidden.logits_tolerance={tolerance} and rounding explain {allowed:.4f}",
                    mend="hidden.codec=fp32 rules out rounding; otherwise the server's precision is another than target.dtype, or the head another",
                )
    return worst


def _variation(said: dict[int, float], ours: torch.Tensor) -> float:
    """Total variation of two distributions, `ours` `[V]` and log-probabilities of some tokens; all others count as one."""
    tokens = torch.tensor(list(said))
    theirs, mine = torch.tensor(list(said.values())).exp(), ours[tokens].float()
    return float(0.5 * ((theirs - mine).abs().sum() + (theirs.sum() - mine.sum()).abs()))


async def _call(function: Any) -> Any:
    return function()


async def _first(waiting: set[asyncio.Future[HiddenSample]]) -> tuple[set[asyncio.Future[HiddenSample]], set[asyncio.Future[HiddenSample]]]:
    return await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
