"""The batched engine on this machine: what steps cost, one request at a time, and many.

    python benchmarks/engine.py smollm2 --package runs/smollm2/package --part step --part stream --part load --json

Parts, whose ways are measured in turn within one run:
    step    one sequence behind 128 positions: steps of 1 to 16 tokens
    stream  single requests, greedily: the engine with the drafter (scheduled), without, and Transformers' `generate` on the same model
    load    closed loops of 1, 2, 4, ... requests: without drafter, fixed numbers of drafts, a threshold, and the two schedulers
With `--short` the loads are of prompts of fewer than 64 tokens: what is wanted of the time to the first token is wanted of these.
The last line is one JSON object: medians of each and all raw figures. `ratio` is what `ratio_is` says, of the first part that was measured:
`stream`: tokens per second with the drafter over those without; `load`: of the scheduler over those of the best fixed number of drafts, the least of all
levels; `step`: seconds of a step of eight tokens over those of one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firesteel.artifact import package_versions
from firesteel.cli.screen import ConsoleScreen
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask, Piece
from firesteel.decoding.policies import FixedLength, LengthPolicy, StaticThreshold
from firesteel.evaluation.machine import machine_facts
from firesteel.kernels.spans import Span
from firesteel.prompts.sources import load_sources
from firesteel.prompts.template import encode_prompt
from firesteel.recipe import load_recipe
from firesteel.stages.engine import open_engine
from firesteel.stages.line import Line
from firesteel.stages.runtime import package_parts
from firesteel.stages.schedule import batch_profile, batch_scheduler

CONTEXT = 128
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)


@dataclass
class Heard:
    """One request as its client saw it, in seconds since the clock's zero."""

    asked: float
    told: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __call__(self, piece: Piece) -> None:
        self.told.append(time.perf_counter())
        self.tokens += piece.tokens


def steps(engine: Engine, repeats: int) -> dict[str, Any]:
    """Milliseconds of one sequence's steps by tokens in them."""
    blocks: list[int] = []
    engine.pool.grow(blocks, CONTEXT + max(SIZES))
    prompt = torch.arange(CONTEXT) + 100
    engine.target.forward(prompt, [Span(-1, blocks, 0, CONTEXT)], [1])
    times: dict[int, list[float]] = {n: [] for n in SIZES}
    for turn in range(repeats + 1):
        for n in SIZES:
            begin = time.perf_counter()
            logits, _ = engine.target.forward(prompt[:n], [Span(-1, blocks, CONTEXT, n)], [n])
            logits.argmax(-1).tolist()
            if turn:
                times[n].append(1e3 * (time.perf_counter() - begin))
    engine.pool.release(blocks)
    medians = {n: statistics.median(t) for n, t in times.items()}
    return {"ms": medians, "eight_over_one": medians[8] / medians[1], "raw_ms": times}


def stream(engine: Engine, line: Line, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Single requests in turn by three engines; the clock starts at the first token, so that the prompt's pass is left out."""
    model, eos = line.target.model, frozenset(line.target.spec.eos_ids)

    def own(speculate: bool) -> Callable[[list[int]], tuple[float, list[int]]]:
        def run(prompt: list[int]) -> tuple[float, list[int]]:
            heard = Heard(time.perf_counter())
            engine.submit(Ask(tuple(prompt), tokens, eos_ids=eos, speculate=speculate), heard)
            while engine.step():
                pass
            return heard.told[-1] - heard.told[0], heard.tokens

        return run

    def generate(prompt: list[int]) -> tuple[float, list[int]]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            begin = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
            first = time.perf_counter()
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
            end = time.perf_counter()
        return end - first - (first - begin), out[0, len(prompt) :].tolist()

    ways = {"drafted": own(True), "plain": own(False), "transformers": generate}
    rows: list[dict[str, Any]] = []
    for number, prompt in enumerate([prompts[0], *prompts]):
        found = {name: way(prompt) for name, way in ways.items()}
        texts = [text for _, text in found.values()]
        if number:  # the first is for warming up
            rows.append({"tokens": len(texts[0]), "same_text": texts[0] == texts[1] == texts[2], "seconds": {n: s for n, (s, _) in found.items()}})
    rates = {n: sum(r["tokens"] - 1 for r in rows) / sum(r["seconds"][n] for r in rows) for n in ways}
    return {"tokens_per_second": rates, "same_text": sum(r["same_text"] for r in rows), "requests": len(rows), "rows": rows}


def load(
    engine: Engine, prompts: Iterator[tuple[int, ...]], eos: frozenset[int], tokens: int, at_once: int, policy: LengthPolicy | None, count: int
) -> dict[str, Any]:
    """A closed loop: as soon as one of `at_once` answers is complete the next prompt is sent, until `count` are."""
    if policy is not None:
        engine.policy = policy
    before, waiting = (engine.counters.rounds, engine.counters.accepted, engine.counters.drafted, engine.counters.steps), count
    heard: list[Heard] = []
    begin = time.perf_counter()
    while waiting or engine.running or engine.waiting:
        while waiting and engine.running + engine.waiting < at_once:
            waiting -= 1
            heard.append(Heard(time.perf_counter()))
            engine.submit(Ask(next(prompts), tokens, eos_ids=eos, speculate=policy is not None), heard[-1])
        engine.step()
    seconds = time.perf_counter() - begin
    rounds, accepted, drafted, made = (
        now - then for now, then in zip((engine.counters.rounds, engine.counters.accepted, engine.counters.drafted, engine.counters.steps), before, strict=True)
    )
    return {
        "tokens_per_second": sum(len(h.tokens) for h in heard) / seconds,
        # The first ones all come at once, which a loop does only at its start.
        "ttft_ms": 1e3 * statistics.median(h.told[0] - h.asked for h in heard[at_once:]),
        "tpot_ms": 1e3 * statistics.median((h.told[-1] - h.told[0]) / max(1, len(h.tokens) - 1) for h in heard),
        "acceptance_length": 1 + accepted / rounds if rounds else 1.0,
        "drafts_per_round": drafted / rounds if rounds else 0.0,
        "steps": made,
        "seconds": seconds,
    }


def salted(prompts: Sequence[list[int]], salt: Iterator[int]) -> Iterator[tuple[int, ...]]:
    """The prompts over and over, each behind a first token of its own: the prefix cache shall not help."""
    for prompt in itertools.cycle(prompts):
        yield (next(salt), *prompt)


def policies(line: Line, engine: Engine, package: Path) -> dict[str, Callable[[], LengthPolicy | None]]:
    """Ways to choose draft lengths, each made anew for every run: the schedulers as the server has them, with what the checkpoint promises as prior."""
    parts = package_parts(line.target, package)
    batch_profile(line, engine, parts)  # measured now, not within a run
    made: dict[str, Callable[[], LengthPolicy | None]] = {"plain": lambda: None}
    made |= {f"fixed {n}": lambda n=n: FixedLength(n) for n in sorted({1, 2, 3, 4, engine.draft_tokens})}  # type: ignore[misc]
    if parts.config.confidence_head:
        made["threshold"] = lambda: StaticThreshold(line.recipe.serve.threshold)
    made["scheduled"] = lambda: batch_scheduler(line, engine, parts, asynchronous=False)
    return made | {"asynchronous": lambda: batch_scheduler(line, engine, parts, asynchronous=True)}


def against(mine: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Tokens per second of one way over those of another, turn by turn: the median, and its spread from the least to the largest.

    `at_least_as_good`: the median is, or the spread does not rule it out.
    """
    ratios = [a / b for a, b in zip(mine, others, strict=True)]
    middle = statistics.median(ratios)
    return {"ratio": middle, "spread": [min(ratios), max(ratios)], "ratios": ratios, "at_least_as_good": max(ratios) >= 1}


def judge_level(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The scheduler at one number of requests, from the tokens per second of all ways: beside the fixed number of drafts that was best (by median), the
    largest fixed number, and no drafter."""
    fixed = [name for name in rates if name.startswith("fixed ")]
    best, most = max(fixed, key=lambda n: statistics.median(rates[n])), max(fixed, key=lambda n: int(n.split()[1]))
    mine = rates["scheduled"]
    return {
        "best": best,
        **against(mine, rates[best]),
        "against_longest": {"longest": most, **against(mine, rates[most])},
        "against_plain": against(mine, rates["plain"]),
    }


def judge_load(found: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """What a load test says in all: the verdict of each level, and what grows from the fewest requests at once to the most, way by way."""
    fewest, most = min(found), max(found)
    growth = {key: {name: found[most][name][key] / found[fewest][name][key] for name in found[most]} for key in ("tokens_per_second", "ttft_ms")}
    verdicts = {level: judge_level({name: row["all_tokens_per_second"] for name, row in rows.items()}) for level, rows in found.items()}
    return {"scheduled_against_best": verdicts, "throughput_growth": growth["tokens_per_second"], "ttft_growth": growth["ttft_ms"]}


def headline(result: Mapping[str, Any]) -> dict[str, Any]:
    """`ratio` and what it is of."""
    if "stream" in result:
        rates = result["stream"]["tokens_per_second"]
        return {"ratio": rates["drafted"] / rates["plain"], "ratio_is": "stream: with the drafter over without"}
    if "scheduled_against_best" in result:
        return {
            "ratio": min(v["ratio"] for v in result["scheduled_against_best"].values()),
            "ratio_is": "load: scheduled over the best fixed number, least level",
        }
    return {"ratio": result["step"]["eight_over_one"], "ratio_is": "step: seconds of eight tokens over one"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--package", required=True, type=Path)
    parser.add_argument("--part", action="append", choices=["step", "stream", "load"])
    parser.add_argument("--domains", default="code,math_reasoning", help="of the held-out prompts (stream)")
    parser.add_argument("--short", type=int, nargs="?", const=64, help="only prompts of fewer tokens than this (64 without a number), for the loads")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--at-once", default="1,2,4,8,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args()
    levels = [int(n) for n in given.at_once.split(",")]
    line = Line(load_recipe(given.recipe, [*given.overrides, "serve.policy=fixed", f"serve.max_requests={max(levels)}", "serve.cache_gb=3"]), ConsoleScreen())
    engine = open_engine(line, given.package)
    held = load_sources(line.recipe.prompts, "eval").prompts
    encoded = {p.id: encode_prompt(line.target.tokenizer, p.history([]), p.tools, where=p.where) for p in held}
    wanted = given.domains.split(",")
    chosen = [encoded[p.id] for p in held if p.domain in wanted][: given.prompts]
    parts, eos = given.part or ["step", "stream", "load"], frozenset(line.target.spec.eos_ids)
    if "stream" in parts and not chosen:
        raise SystemExit(f"no held-out prompt is of {wanted}; there are {sorted({p.domain for p in held})}")
    many = [ids for ids in encoded.values() if given.short is None or len(ids) < given.short]
    if not many:
        raise SystemExit(f"no held-out prompt has fewer than {given.short} tokens; the shortest has {min(map(len, encoded.values()))}")
    result: dict[str, Any] = {
        "benchmark": "engine",
        "versions": package_versions(),
        "machine": machine_facts(accelerator=None).model_dump(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }
    ways = policies(line, engine, given.package)
    if "step" in parts:
        result["step"] = steps(engine, 8 * given.repeats)
    if "stream" in parts:
        scheduled = ways["scheduled"]()
        assert scheduled is not None, "the scheduler drafts"
        engine.policy = scheduled
        result["stream"] = stream(engine, line, chosen, given.tokens)
        rates = result["stream"]["tokens_per_second"]
        result["over_transformers"] = rates["drafted"] / rates["transformers"]
    if "load" in parts:
        result["load"], result["load_prompts"] = {}, {"short": given.short, "count": len(many), "tokens": statistics.mean(map(len, many))}
        vocab = line.target.spec.vocab_size
        salt = itertools.cycle(range(min(1000, vocab // 4), min(40_000, vocab)))
        for level in levels:
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
            for repeat in range(given.repeats):
                for name in ways if repeat % 2 == 0 else reversed(ways):
                    runs[name].append(load(engine, salted(many, salt), eos, given.tokens, level, ways[name](), max(6, 3 * level)))
                    print(f"{level} at once, {name}: {runs[name][-1]['tokens_per_second']:.1f} tokens/s", flush=True)
            result["load"][level] = {
                name: {key: statistics.median(r[key] for r in rs) for key in rs[0]} | {"all_tokens_per_second": [r["tokens_per_second"] for r in rs]}
                for name, rs in runs.items()
            }
        result |= judge_load(result["load"])
    print(json.dumps({**headline(result), **result}))


if __name__ == "__main__":
    main()
