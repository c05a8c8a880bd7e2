"""Tokens per second of a vLLM server that hands out hidden states, beside the same server that does not, in turn.

Two servers of the recipe's target are started, both with the recipe's settings and neither with a prefix cache: one with Firesteel's connector, which
leaves states in Mooncake (or in a folder, `--exchange disk`), and one that is vLLM alone. Four arms take turns, each with prompts that no server has read,
`--at-once` at a time; one token is asked for:
    extract    of the first server the states, by Firesteel's own client, until they are checked and here
    asked      the same server, states wanted and left where they are: the client's work is not counted
    unasked    the same server, no states wanted; it still captures every layer's states into its cache
    plain      the server without connector: the baseline
The server that is not asked is idle. The client runs in this process; on a machine without a GPU its work takes cores from the servers.

The last line of stdout is one JSON object; `ratio` is the tokens per second of `extract` over those of `plain`, the median of the turns; `ratios` has it
for every arm and turn. `wait_ms` is how long the client waits from the server's answer until a sample's bytes are here: median and 95th percentile. The
vLLM of `target.vllm.python` is taken.

Usage: python benchmarks/extract_rate.py RECIPE [section.key=value ...] [--exchange mooncake] [--tokens 512] [--at-once 4] [--requests 24] [--turns 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from ports import free_port
from running import facts, quantiles
from transformers import AutoConfig

from firesteel.cli.screen import ConsoleScreen
from firesteel.hidden.exchange import open_exchange
from firesteel.hidden.sample import predictable_positions
from firesteel.hidden.weights import weights_digest
from firesteel.hidden.wire import Wanted, to_ranges
from firesteel.recipe import Recipe, load_recipe
from firesteel.serving.command import find_engine
from firesteel.stages import extract_server
from firesteel.stages.line import Line, pick_layer_ids
from firesteel.target.layout import read_layout
from firesteel.target.server import Server, ServerPlan, exchange_config, local_url
from firesteel.target.vllm import VllmStates

ARMS = ("extract", "asked", "unasked", "plain")
_LEFT_OUT = ("--speculative-config", "--kv-transfer-config")
Job = Callable[[list[int]], Awaitable[Any]]


class Timed(VllmStates):
    """Firesteel's client; notes how long it waits for each sample after the server's answer, in seconds."""

    waits: list[float]

    async def _wait(self, endpoint: str, handle: str, deadline: float) -> bytes:
        begin = time.perf_counter()
        data = await super()._wait(endpoint, handle, deadline)
        self.waits.append(time.perf_counter() - begin)
        return data


def without_extraction(plan: ServerPlan, port: int) -> ServerPlan:
    """The same server at another port: without the connector, and without the method that captures states."""
    words = iter(plan.command)
    command: list[str] = []
    for word in words:
        if word in _LEFT_OUT:
            next(words)
        elif word == "--port":
            command += [word, str(port)]
            next(words)
        else:
            command.append(word)
    host = plan.command[plan.command.index("--host") + 1]
    return replace(plan, command=command, url=local_url(host, port), master=[])


def make_prompts(count: int, tokens: int, vocab: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens; no two begin alike, so that no cache of prefixes would help."""
    chance = random.Random(seed)
    firsts = chance.sample(range(vocab // 2, vocab), min(count, vocab - vocab // 2))
    return [[firsts[i % len(firsts)], *(chance.randrange(vocab // 2, vocab) for _ in range(tokens - 1))] for i in range(count)]


async def timed(job: Job, prompts: Sequence[list[int]], at_once: int) -> float:
    """Seconds until all prompts are done, `at_once` at a time."""
    todo = list(reversed(prompts))

    async def work() -> None:
        while todo:
            await job(todo.pop())

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(min(at_once, len(prompts)))))
    return time.perf_counter() - begin


async def measure(client: Timed, urls: dict[str, str], a: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """All turns of all arms: tokens per second, and the waits of `extract`."""
    mask = torch.ones(a.tokens, dtype=torch.bool)
    wanted = to_ranges(predictable_positions(mask))
    number = 0

    async def extract(prompt: list[int]) -> None:
        await client.fetch(urls["extract"], prompt, [True] * len(prompt), "rate")

    async def asked(prompt: list[int]) -> None:
        nonlocal number
        number += 1
        handle = f"asked-{number}"
        await client._complete(urls["extract"], prompt, Wanted(handle, client.layer_ids, wanted, client.codec).to_params())
        left.append(handle)

    def plainly(url: str) -> Job:
        async def job(prompt: list[int]) -> None:
            await client._post(url, {"prompt": prompt, "max_tokens": 1, "temperature": 0.0})

        return job

    jobs: dict[str, Job] = {"extract": extract, "asked": asked, "unasked": plainly(urls["extract"]), "plain": plainly(urls["plain"])}
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    waits: list[float] = []
    left: list[str] = []
    for turn in range(a.warmup + a.turns):
        for place, arm in enumerate(ARMS if turn % 2 == 0 else reversed(ARMS)):
            client.waits = []
            prompts = make_prompts(a.requests, a.tokens, vocab, 1000 * turn + place)
            seconds = await timed(jobs[arm], prompts, a.at_once)
            while left:  # not counted: who asked for them takes them away
                handle = left.pop()
                await client._wait(urls["extract"], handle, asyncio.get_running_loop().time() + client.timeout)
                await asyncio.to_thread(client.exchange.remove, handle)
            if turn >= a.warmup:
                rates[arm].append(a.requests * a.tokens / seconds)
                waits += client.waits if arm == "extract" else []
            name = f"turn {turn + 1 - a.warmup}" if turn >= a.warmup else "warm-up"
            print(f"{name}, {arm}: {a.requests * a.tokens / seconds:.0f} tokens/s", flush=True)
    return {**compare(rates), "wait_ms": quantiles([1e3 * w for w in waits]), "waits_ms": [1e3 * w for w in waits], "tokens_per_second": rates}


def compare(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Every arm over `plain`, turn by turn, and the medians."""
    ratios = {arm: [x / y for x, y in zip(rates[arm], rates["plain"], strict=True)] for arm in rates if arm != "plain"}
    medians = {arm: statistics.median(values) for arm, values in ratios.items()}
    return {
        "ratio": medians["extract"],
        "median_ratios": medians,
        "ratios": ratios,
        "median_tokens_per_second": {k: statistics.median(v) for k, v in rates.items()},
    }


def settings(a: argparse.Namespace) -> Recipe:
    """The recipe with ports of its own, so that nothing that runs already is in the way."""
    transport = ["hidden.transport=disk"] if a.exchange == "disk" else ["hidden.transport=mooncake", f"hidden.mooncake.port={free_port(2)}"]
    own = ["target.engine=vllm", "target.endpoints=[]", f"target.vllm.port={free_port()}", *transport]
    recipe = load_recipe(a.recipe, [*a.overrides, *own])
    if recipe.hidden.max_length < a.tokens:
        recipe = load_recipe(a.recipe, [*a.overrides, *own, f"hidden.max_length={a.tokens}"])
    return recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a named recipe or a YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--exchange", choices=["mooncake", "disk"], default="mooncake")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--at-once", type=int, default=4, help="requests under way")
    parser.add_argument("--requests", type=int, default=24, help="of an arm in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="turns before them that are not counted")
    # vLLM's own choice on a CPU is not the same for both: beside a connector it kept no core free where it otherwise does.
    spare = max(1, (os.cpu_count() or 1) - 1)
    parser.add_argument("--threads", type=int, default=spare, help="of each server, on a CPU: as many for both; all cores but one if not given")
    a = parser.parse_intermixed_args()
    recipe = settings(a)
    line = Line(recipe, ConsoleScreen())
    layout, engine = read_layout(recipe.target), find_engine(recipe.serve, recipe.target.vllm)
    vocab = vocabulary(recipe, layout.path)
    plan = extract_server.plan(line)
    plan.env.update({"OMP_NUM_THREADS": str(a.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    plain = without_extraction(plan, free_port())
    folder, patience = (line.folder / "extract_rate").absolute(), recipe.target.vllm.start_timeout
    print(f"starting {engine.distribution} {engine.version}, twice; the logs are in {folder}", flush=True)
    with Server(plan, folder / "extract", patience), Server(plain, folder / "plain", patience):
        client = Timed(
            open_exchange(exchange_config(recipe.hidden, line.folder, segment=False)),
            layer_ids=pick_layer_ids(recipe, layout.num_layers),
            num_layers=layout.num_layers,
            target="rate",
            weights=weights_digest(layout.path, recipe.target.revision),
            codec=recipe.hidden.codec,
            timeout=recipe.hidden.feed.timeout,
        )

        async def run() -> dict[str, Any]:
            try:
                return await measure(client, {"extract": plan.url, "plain": plain.url}, a, vocab)
            finally:
                await client.close()
                client.exchange.close()

        found = asyncio.run(run())
    told = {"codec": recipe.hidden.codec, "layer_ids": client.layer_ids, "arguments": vars(a), "recipe": recipe.model_dump(), **facts()}
    told["versions"] |= {engine.distribution: engine.version}
    print(json.dumps({"benchmark": "extract_rate", **found, **told}))


def vocabulary(recipe: Recipe, model: str) -> int:
    """Tokens that the target knows, by its config."""
    config = AutoConfig.from_pretrained(model, revision=recipe.target.revision, trust_remote_code=recipe.target.trust_remote_code)
    return int(config.get_text_config().vocab_size)


if __name__ == "__main__":
    main()
