"""One drafter, served by Firesteel's own engine and by vLLM: the same greedy text, and tokens per second side by side, with the drafter and without.

The package is one that this vLLM serves: on a CPU its V1 runner takes dflash, eagle3 and peagle. No more than two servers are up at once: Firesteel's,
which is asked with drafts and without, and beside it vLLM's, started once with the drafter and once without in every turn (in the other order in every
other turn). While two are up, closed loops of `--levels` requests at once take turns among them, with prompts that no server has read (a first token of
their own keeps caches of prefixes out). What is compared was measured while both servers were up; vLLM's own gain is taken by way of Firesteel's plain
decoding, which was measured beside both.

The last line of stdout is one JSON object; `ratio` is Firesteel's tokens per second with the drafter over vLLM's with it, the median of the turns, of the
levels the least. `levels` has for each level `drafted` and `plain` (ours over vLLM's), `gain` (with the drafter over without) of both, and all tokens per
second; `same_text` shares of `--texts` held-out prompts to which two ways answer alike, asked one by one; `acceptance_length` is by the servers' own
counters, over all loads.

Usage: python benchmarks/vllm_drafts.py RECIPE [section.key=value ...] [--package FOLDER] [--levels 1,4,16] [--requests 3] [--turns 2] [--texts 20]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from ports import free_port
from running import facts

from firesteel.cli.screen import ConsoleScreen
from firesteel.drafters.registry import get_spec
from firesteel.package.card import speculative_config
from firesteel.package.load import load
from firesteel.prompts.sources import load_sources
from firesteel.prompts.template import encode_prompt
from firesteel.recipe import Recipe, load_recipe
from firesteel.serving.command import Engine, find_engine, plan_serving
from firesteel.serving.scrape import between, scrape
from firesteel.stages.line import Line
from firesteel.stages.prompts import spread
from firesteel.target.loading import load_tokenizer, resolve_target
from firesteel.target.server import Server, ServerPlan, local_url

_PATIENCE = 600.0


@dataclass
class Client:
    """One way to ask a server. `body`: what is sent beside the prompt."""

    url: str
    model: str
    body: dict[str, Any]

    async def ask(self, http: httpx.AsyncClient, prompt: Sequence[int]) -> tuple[str, int]:
        """The answer's text, and its tokens."""
        answer = await http.post(f"{self.url}/v1/completions", json={"model": self.model, "prompt": list(prompt), "temperature": 0, **self.body})
        answer.raise_for_status()
        found = answer.json()
        return str(found["choices"][0]["text"]), int(found["usage"]["completion_tokens"])


class Asks:
    """Held-out prompts, as they are or behind a first token of their own."""

    def __init__(self, prompts: list[list[int]], vocab: int) -> None:
        self.prompts = prompts
        self._salt = itertools.cycle(range(min(1000, vocab // 4), vocab))

    def unread(self, count: int) -> list[list[int]]:
        """So many that no server has read, from the first prompt on."""
        return [[next(self._salt), *self.prompts[i % len(self.prompts)]] for i in range(count)]


@dataclass
class Found:
    """All that is measured: a row for each load, the texts of every way, and drafting by the servers' counters."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    drafting: dict[str, list[int]] = field(default_factory=lambda: {"ours": [0, 0], "vllm": [0, 0]})  # rounds, accepted


async def closed_loop(client: Client, prompts: Sequence[Sequence[int]], at_once: int) -> tuple[int, float, list[str]]:
    """Ask all prompts, `at_once` at a time: tokens written, seconds, and the texts in the prompts' order."""
    todo, texts, tokens = list(enumerate(prompts))[::-1], [""] * len(prompts), 0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=_PATIENCE, limits=limits, trust_env=False) as http:

        async def work() -> None:
            nonlocal tokens
            while todo:
                number, prompt = todo.pop()
                texts[number], written = await client.ask(http, prompt)
                tokens += written

        begin = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(min(at_once, len(prompts)))))
        return tokens, time.perf_counter() - begin, texts


def run_phase(a: argparse.Namespace, servers: tuple[ServerPlan, ServerPlan], phase: str, turn: int, asks: Asks, folder: Path, found: Found) -> None:
    """Both servers up, ours and vLLM's: texts (in the first turn), then the loads of all levels."""
    ours, theirs = servers
    with Server(ours, folder / "ours", a.patience), Server(theirs, folder / f"vllm-{phase}", a.patience):
        named = {url: model_of(url) for url in (ours.url, theirs.url)}
        body = {"max_tokens": a.tokens}
        clients = {
            "ours drafted": Client(ours.url, named[ours.url], {**body, "speculate": True}),
            "ours plain": Client(ours.url, named[ours.url], {**body, "speculate": False}),
            f"vllm {phase}": Client(theirs.url, named[theirs.url], body),
        }
        for name, client in clients.items():  # before anything is timed
            texts = asyncio.run(closed_loop(client, asks.prompts[: a.texts], 1))[2]
            found.texts.setdefault(name, texts)
        for number, level in enumerate(a.levels):
            names = list(clients) if (turn + number) % 2 == 0 else list(reversed(clients))
            for name in names:
                asyncio.run(closed_loop(clients[name], asks.unread(level), level))  # so many at once for the first time
                # Unread by this server in the other way, too: what it has read for one it would not read again for the other.
                prompts = asks.unread(max(a.least, a.requests * level))
                before = scrape(clients[name].url, {}, _PATIENCE)
                tokens, seconds, _ = asyncio.run(closed_loop(clients[name], prompts, level))
                served = between(before, scrape(clients[name].url, {}, _PATIENCE), name)
                if name.endswith("drafted") and served.drafting is not None:
                    counts = found.drafting[name.split()[0]]
                    counts[0] += served.drafting.rounds
                    counts[1] += served.drafting.accepted
                row = {"turn": turn, "phase": phase, "level": level, "way": name, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
                found.rows.append(row)
                print(f"turn {turn + 1}, {level} at once, {name}: {row['tokens_per_second']:.1f} tokens/s", flush=True)


def model_of(url: str) -> str:
    """The name of a server's model."""
    return str(httpx.get(f"{url}/v1/models", timeout=_PATIENCE, trust_env=False).json()["data"][0]["id"])


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ratios level by level from the loads of all turns: each of two loads that ran while the same two servers were up."""
    rates = {(r["level"], r["turn"], r["phase"], r["way"]): r["tokens_per_second"] for r in rows}
    turns, levels = sorted({r["turn"] for r in rows}), sorted({r["level"] for r in rows})

    def over(level: int, first: str, second: str, phases: Sequence[str]) -> dict[str, Any]:
        ratios = [rates[level, t, p, first] / rates[level, t, p, second] for t in turns for p in phases]
        return {"ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)], "ratios": ratios}

    found: dict[int, dict[str, Any]] = {}
    for level in levels:
        drafted = over(level, "ours drafted", "vllm drafted", ["drafted"])
        plain = over(level, "ours plain", "vllm plain", ["plain"])
        own = over(level, "ours drafted", "ours plain", ["drafted", "plain"])
        theirs = [
            (rates[level, t, "drafted", "vllm drafted"] / rates[level, t, "drafted", "ours plain"])
            / (rates[level, t, "plain", "vllm plain"] / rates[level, t, "plain", "ours plain"])
            for t in turns
        ]
        gains = {"ours": own, "vllm": {"ratio": statistics.median(theirs), "spread": [min(theirs), max(theirs)], "ratios": theirs}}
        ways = sorted({r["way"] for r in rows})
        paces = {way: [r["tokens_per_second"] for r in rows if r["level"] == level and r["way"] == way] for way in ways}
        medians = {way: statistics.median(values) for way, values in paces.items()}
        found[level] = {"drafted": drafted, "plain": plain, "gain": gains, "tokens_per_second": medians, "all_tokens_per_second": paces}
    return {"ratio": min(v["drafted"]["ratio"] for v in found.values()), "levels": found}


def same_text(texts: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Share of the prompts to which two ways answer alike, for every two of them."""
    return {f"{x} = {y}": sum(a == b for a, b in zip(texts[x], texts[y], strict=True)) / len(texts[x]) for x, y in itertools.combinations(sorted(texts), 2)}


def plans(a: argparse.Namespace, recipe: Recipe, package: Path, engine: Engine) -> tuple[ServerPlan, dict[str, ServerPlan]]:
    """Our server, and vLLM's by phase."""
    loaded = load(package)
    if loaded.contract is None:
        raise SystemExit(f"{package} has no contract: `firesteel convert` with --target writes one")
    spec = get_spec(loaded.config.algorithm)
    if spec.stitch:
        raise SystemExit(f"{package} holds a drafter of {spec.name}, which is served from a copy of its target")
    if engine.cpu and spec.second_runner(loaded.config):
        raise SystemExit(f"{package} holds a drafter of {spec.name} that needs vLLM's V2 model runner, which its CPU build has not")
    speculative = speculative_config(loaded.config, loaded.contract, str(package.absolute()))
    speculative["num_speculative_tokens"] = recipe.serve.tokens or loaded.contract.speculative_tokens
    serve = recipe.serve.model_copy(update={"port": free_port()})
    drafted = plan_serving(engine, resolve_target(recipe.target), recipe.target, serve, speculative)
    at = drafted.command.index("--speculative-config")
    plain = ServerPlan([*drafted.command[:at], *drafted.command[at + 2 :]], drafted.env, drafted.url, setting="serve")
    what, port = (a.recipe if a.package is None else str(package)), free_port()
    told = [*a.overrides, "serve.args=[]", f"serve.port={port}", f"serve.max_requests={max(a.levels)}"]
    command = [sys.executable, "-m", "firesteel.cli.app", "serve", what, *told, "--engine", "own"]
    return ServerPlan(command, {}, local_url(serve.host, port), setting="serve"), {"drafted": drafted, "plain": plain}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a named recipe or a YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--package", type=Path, help="a packaged drafter; without it the run's own")
    parser.add_argument("--levels", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16], help="requests at once, comma-separated")
    parser.add_argument("--requests", type=int, default=3, help="of a load, for each of those at once")
    parser.add_argument("--least", type=int, default=6, help="requests of a load at least")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    parser.add_argument("--texts", type=int, default=20, help="held-out prompts whose answers are compared")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, help="of each server, on a CPU")
    parser.add_argument("--patience", type=float, default=_PATIENCE, help="seconds until a server must be up")
    return parser.parse_intermixed_args()


def main() -> None:
    a = parse()
    recipe = load_recipe(a.recipe, a.overrides)
    line = Line(recipe, ConsoleScreen())
    package = a.package or line.folder / "package"
    engine = find_engine(recipe.serve, recipe.target.vllm)
    ours, theirs = plans(a, recipe, package, engine)
    if a.threads is not None:
        threads = {"OMP_NUM_THREADS": str(a.threads), "MKL_NUM_THREADS": str(a.threads)}
        ours.env.update(threads)
        for plan in theirs.values():
            plan.env.update({**threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    tokenizer = load_tokenizer(resolve_target(recipe.target), recipe.target)
    held = load_sources(recipe.prompts, "eval").prompts
    prompts = [encode_prompt(tokenizer, p.history([]), p.tools, where=p.where) for p in spread(held, max(a.texts, len(held)))]
    asks, found = Asks(prompts, len(tokenizer)), Found()
    for turn in range(a.turns):
        for phase in theirs if turn % 2 == 0 else reversed(theirs):
            run_phase(a, (ours, theirs[phase]), phase, turn, asks, (line.folder / "vllm_drafts").absolute(), found)
    lengths = {name: 1 + accepted / rounds if rounds else None for name, (rounds, accepted) in found.drafting.items()}
    told = {
        "same_text": same_text(found.texts),
        "texts": found.texts,
        "acceptance_length": lengths,
        "rows": found.rows,
        "recipe": recipe.model_dump(),
        **facts(),
    }
    told["versions"] |= {engine.distribution: engine.version}
    arguments = {k: str(v) for k, v in vars(a).items()}
    print(json.dumps({"benchmark": "vllm_drafts", **summarise(found.rows), "arguments": arguments, **told}))


if __name__ == "__main__":
    main()
