"""The pure parts of the benchmarks: verdicts, plans of trouble, counts of uses, what is compared with what."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import codec
import engine as engine_script
import extract_rate
import long_context
import pytest
import soak_parts
import states_server
import torch
import transfer
import vllm_drafts
from feed_job import LAYERS, TARGET
from ports import free_port
from running import quantiles

from firesteel.evaluation.schema import Comparison
from firesteel.hidden.sample import HiddenSample
from firesteel.inside_vllm.writer import gather
from firesteel.target.server import ServerPlan


def test_the_scheduler_is_judged_against_the_best_fixed_length_turn_by_turn() -> None:
    rates = {"plain": [50.0, 50, 50], "fixed 2": [60.0, 61, 59], "fixed 8": [40.0, 40, 41], "threshold": [99.0, 99, 99], "scheduled": [57.0, 62, 58]}
    found = engine_script.judge_level(rates)
    assert found["best"] == "fixed 2"
    assert found["ratios"] == [57 / 60, 62 / 61, 58 / 59]
    assert found["ratio"] == 58 / 59
    assert found["spread"] == [57 / 60, 62 / 61]
    assert found["at_least_as_good"]  # one turn of three was: noise
    assert found["against_longest"]["longest"] == "fixed 8"
    assert found["against_longest"]["ratio"] == 1.425
    assert found["against_plain"]["ratio"] == 1.16
    worse = engine_script.judge_level({**rates, "scheduled": [50.0, 50, 50]})
    assert not worse["at_least_as_good"]


def test_growth_is_from_the_fewest_requests_to_the_most_and_the_headline_is_the_least_level() -> None:
    def row(pace: float, first: float) -> dict[str, Any]:
        return {"tokens_per_second": pace, "ttft_ms": first, "all_tokens_per_second": [pace]}

    ways = ("plain", "fixed 1", "fixed 8")
    load = {n: {**{w: row(100.0 * n, 50.0) for w in ways}, "scheduled": row(90.0 * n + 20, 50.0 + n)} for n in (1, 4, 16)}
    found = engine_script.judge_load(load)
    assert found["throughput_growth"]["plain"] == 16
    assert found["ttft_growth"]["scheduled"] == 66 / 51
    assert engine_script.headline(found)["ratio"] == (90 * 16 + 20) / 1600
    assert engine_script.headline({"step": {"eight_over_one": 1.2}})["ratio"] == 1.2
    assert engine_script.headline({**found, "stream": {"tokens_per_second": {"drafted": 3.0, "plain": 2.0}}})["ratio"] == 1.5


def test_prompt_lengths_end_at_the_targets_limit() -> None:
    assert long_context.pick_lengths(None, 8127, True) == [1024, 2048, 4096, 8127]
    assert long_context.pick_lengths(None, 40_000, True) == [1024, 2048, 4096, 8192]
    assert long_context.pick_lengths(None, 20_000, False) == [1024, 2048, 4096, 8192, 16384, 20_000]
    assert long_context.pick_lengths(None, 447, True) == [447]
    assert long_context.pick_lengths("512,16000,30000", 8127, True) == [512, 8127]
    assert long_context.pick_lengths("16000", 20_000, True) == [16000]  # asked for
    rows = [{"package": p, "length": n, "pooled": v} for p, n, v in (("a", 1024, 2.0), ("a", 4096, 1.5), ("b", 1024, 2.0), ("b", 4096, 1.9))]
    assert long_context.growth(rows, "pooled") == {"a": 0.75, "b": 0.95}


def test_troubles_are_as_many_as_asked_for_and_each_is_over_before_the_next() -> None:
    acts = soak_parts.plan_troubles(3600, servers=3, kills=3, removals=2, master=True, down=20)
    assert [a.at for a in acts] == sorted(a.at for a in acts)
    assert 0 < acts[0].at < acts[-1].at < 3600
    kills = [a for a in acts if a.verb == "kill" and a.name != "master"]
    assert [a.name for a in kills] == ["server 0", "server 1", "server 2"]
    assert [a.verb for a in acts if a.name == "master"] == ["kill", "start"]
    assert sum(a.verb == "remove" for a in acts) == sum(a.verb == "add" for a in acts) == 2
    for gone, back in zip(acts[::2], acts[1::2], strict=True):
        assert (gone.name, gone.verb, back.verb) in {(back.name, "kill", "start"), (back.name, "remove", "add")}
        assert back.at == gone.at + 20
    short = soak_parts.plan_troubles(60, servers=2, kills=3, removals=0, master=False, down=20)
    assert all(back.at == gone.at + 7.5 for gone, back in zip(short[::2], short[1::2], strict=True))
    assert soak_parts.plan_troubles(60, servers=2, kills=0, removals=0, master=False, down=20) == []


def make_sample(tokens: int) -> HiddenSample:
    mask, positions = torch.ones(tokens, dtype=torch.bool), torch.arange(tokens - 1)
    aux, last = torch.randn(tokens, len(LAYERS), 4), torch.randn(tokens - 1, 4)
    return HiddenSample("document0", torch.arange(tokens), mask, aux, last, positions, LAYERS, TARGET)


def test_uses_are_of_each_sample_that_arrived() -> None:
    uses = soak_parts.Uses(2, budget=1)
    first, second, again = (uses.number(make_sample(5)) for _ in range(3))
    uses.note([first, second], [0, 1])
    assert uses.report() == {"budget": 1, "max_uses": 1, "over_budget": 0, "samples": 3, "document_uses": [1, 1]}
    uses.note([again], [0])  # the same document, fetched anew
    assert uses.report()["max_uses"] == 1
    uses.note([first, first], [0, 0])
    assert uses.report() == {"budget": 1, "max_uses": 3, "over_budget": 1, "samples": 3, "document_uses": [1, 4]}


def test_memory_is_compared_since_a_process_began_last() -> None:
    rows = [(float(t), 100.0 if t < 40 else 50.0 + t) for t in range(200)]
    grown = soak_parts.growths({"trainer": [(float(t), 10.0) for t in range(200)], "server 0": rows}, [(30.0, "kill server 0"), (40.0, "start server 0")])
    assert grown["trainer"] == 1
    assert 1.4 < grown["server 0"] < 1.6  # 80 seconds later, at one megabyte a second


def test_a_sample_in_a_cache_like_vllms_is_read_back_by_the_connectors_own_reader() -> None:
    sample = make_sample(37)
    cache = states_server.as_cache(sample)
    assert cache.shape == (3, len(LAYERS) + 1, states_server.BLOCK, 4)
    blocks = range(len(cache))
    assert gather(cache, blocks, torch.arange(37), range(len(LAYERS))).equal(sample.aux)
    assert gather(cache, blocks, sample.last_positions, [len(LAYERS)])[:, 0].equal(sample.last)


def test_samples_have_the_megabytes_that_are_asked_for_and_fp8_halves_them() -> None:
    states = transfer.make_states(transfer.tokens_of(2.0, 64), 64)
    bf16, fp8 = (len(states.pack("sample", name)) for name in transfer.CODECS)
    assert bf16 == pytest.approx(2e6, rel=0.04)
    assert fp8 / bf16 == pytest.approx(0.5, abs=0.06)  # a scale for each state, which has only 64 numbers
    found = transfer.compare({"raw": [(1.0, 1.0), (1.0, 3.0)], "exchange": [(2.0, 2.0), (1.0, 3.0)], "sample": [(4.0, 4.0), (4.0, 4.0)]}, 10**6)
    assert found["ratio"] == 0.75
    assert found["sample_ratio"] == 0.375
    assert found["megabytes_per_second"]["raw"] == {"put": 1.0, "get": pytest.approx(2 / 3)}


def test_the_plain_server_is_the_same_but_for_what_extracts() -> None:
    command = ["python", "-m", "vllm", "--host", "0.0.0.0", "--port", "8000", "--dtype", "float32", "--no-enable-prefix-caching"]
    extracting = ServerPlan(
        [*command, "--speculative-config", "{}", "--kv-transfer-config", "{}", "--x"],
        {"A": "1"},
        "http://127.0.0.1:8000",
        ["master", "-rpc_port=1", "-metrics_port=2"],
    )
    plain = extract_rate.without_extraction(extracting, 9000)
    assert plain.command == [*command[:6], "9000", *command[7:], "--x"]
    assert (plain.env, plain.url, plain.master) == ({"A": "1"}, "http://127.0.0.1:9000", [])
    assert plain.master_ports == (), "they are the first server's, and taken"
    assert extracting.master_ports == (1, 2)
    assert "8000" in extracting.command


def test_prompts_of_the_rate_do_not_begin_alike_and_rates_are_compared_by_turns() -> None:
    prompts = extract_rate.make_prompts(40, 16, 160, 1)
    assert {len(p) for p in prompts} == {16}
    assert len({p[0] for p in prompts}) == 40
    assert prompts != extract_rate.make_prompts(40, 16, 160, 2)
    found = extract_rate.compare({"extract": [95.0, 90, 100], "asked": [96.0] * 3, "unasked": [97.0] * 3, "plain": [100.0, 100, 100]})
    assert found["ratio"] == 0.95
    assert found["ratios"]["extract"] == [0.95, 0.9, 1.0]
    assert "plain" not in found["ratios"]


def test_drafts_are_compared_with_what_ran_beside_them() -> None:
    def row(turn: int, phase: str, way: str, pace: float) -> dict[str, Any]:
        return {"turn": turn, "phase": phase, "level": 4, "way": way, "tokens_per_second": pace}

    rows = []
    for turn, slow in ((0, 1.0), (1, 0.5)):  # the machine was half as fast in the second turn
        rows += [row(turn, "drafted", w, slow * p) for w, p in (("ours drafted", 120.0), ("ours plain", 60.0), ("vllm drafted", 100.0))]
        rows += [row(turn, "plain", w, slow * p) for w, p in (("ours drafted", 240.0), ("ours plain", 120.0), ("vllm plain", 100.0))]
    found = vllm_drafts.summarise(rows)
    level = found["levels"][4]
    assert found["ratio"] == level["drafted"]["ratio"] == 1.2
    assert level["plain"]["ratio"] == 1.2
    assert level["gain"]["ours"]["ratio"] == 2
    assert level["gain"]["vllm"]["ratio"] == 2
    same = vllm_drafts.same_text({"vllm plain": ["a", "b"], "ours plain": ["a", "c"]})
    assert same == {"ours plain = vllm plain": 0.5}


def test_loads_begin_with_tokens_of_their_own() -> None:
    asks = vllm_drafts.Asks([[1, 2], [3]], vocab=64)
    first, second = asks.unread(3), asks.unread(3)
    assert [p[1:] for p in first] == [[1, 2], [3], [1, 2]]
    assert len({p[0] for p in (*first, *second)}) == 6
    assert all(16 <= p[0] < 64 for p in (*first, *second))


def test_no_server_reads_a_timed_prompt_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not for the other way of asking it either: its cache of beginnings would help the second."""
    asked: dict[str, list[tuple[int, ...]]] = {}

    async def closed_loop(client: vllm_drafts.Client, prompts: list[list[int]], at_once: int) -> tuple[int, float, list[str]]:
        asked.setdefault(client.url, []).extend(tuple(p) for p in prompts if p[0] >= 16)  # salted: not the texts that are compared
        return 8 * len(prompts), 1.0, ["" for _ in prompts]

    monkeypatch.setattr(vllm_drafts, "Server", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(vllm_drafts, "model_of", lambda url: url)
    monkeypatch.setattr(vllm_drafts, "closed_loop", closed_loop)
    monkeypatch.setattr(vllm_drafts, "scrape", lambda *_: None)
    monkeypatch.setattr(vllm_drafts, "between", lambda *_: argparse.Namespace(drafting=None))
    given = argparse.Namespace(patience=1.0, tokens=8, texts=2, levels=[1, 4], least=6, requests=2)
    servers = (ServerPlan([], {}, "http://ours"), ServerPlan([], {}, "http://vllm"))
    vllm_drafts.run_phase(given, servers, "plain", 0, vllm_drafts.Asks([[1, 2], [3]], vocab=4096), tmp_path, vllm_drafts.Found())
    assert {url: len(prompts) for url, prompts in asked.items()} == {"http://ours": 2 * (1 + 6 + 4 + 8), "http://vllm": 1 + 6 + 4 + 8}
    assert all(len(set(prompts)) == len(prompts) for prompts in asked.values())


def test_fp8_over_bf16() -> None:
    both = {"validation": {"acceptance_length": 2.0}, "bytes": 200}
    arms = {"bf16": both, "fp8": {"validation": {"acceptance_length": 1.9}, "bytes": 102}}
    comparison = Comparison(first="fp8", second="bf16", first_pooled=1.98, second_pooled=2.0, ratio=0.99, interval=(0.97, 1.01), prompts=9, unpaired=0)
    found = codec.summarise(arms, comparison)
    assert (found["ratio"], found["validation_ratio"], found["bytes_ratio"]) == (0.99, 0.95, 0.51)
    assert found["change"] == pytest.approx(0.01)
    assert found["accepted_ratio"] == pytest.approx(0.98)
    assert codec.summarise(arms, None)["ratio"] is None


def test_quantiles_and_ports() -> None:
    assert quantiles([1.0, 2.0, 3.0]) == {"median": 2.0, "p95": pytest.approx(2.9)}
    assert free_port(2) < 65535
