"""The connector in a real vLLM (CPU build), through a folder: states equal Transformers', whatever the scheduler does with the prompts."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from extract_cases import LAYER_IDS, document, save_served_target, truth
from extract_running import LONGEST, Running, run, running

from firesteel.errors import HiddenStateError, RecipeError
from firesteel.hidden.exchange import FolderExchange
from firesteel.hidden.sample import HiddenSample
from firesteel.hidden.stores import DiskStore
from firesteel.hidden.weights import weights_digest
from firesteel.recipe import recipe_from_dict
from firesteel.stages import extract, prompts, respond
from firesteel.stages.line import Line
from firesteel.stages.states import check_servers
from firesteel.target.front import FrontTarget
from firesteel.target.vllm import VllmStates

sys.path.insert(0, str(Path(__file__).parents[1] / "line"))
from line_screen import QuietScreen
from tiny_target import recipe_settings, write_prompts

pytestmark = pytest.mark.vllm

CHUNK = 96


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The hard case: small chunks, few requests at a time, prefixes cached (which the command that we build turns off), the second model runner."""
    torch.set_num_threads(1)
    args = ["--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "6", "--enable-prefix-caching"]
    with running(tmp_path_factory.mktemp("served"), {}, args, second_runner=True) as found:
        yield found


def fetch_all(states: VllmStates, url: str, documents: list[tuple[list[int], list[bool]]]) -> list[HiddenSample]:
    async def job(s: VllmStates) -> list[HiddenSample]:
        return list(await asyncio.gather(*(s.fetch(url, ids, mask, f"d{i}") for i, (ids, mask) in enumerate(documents))))

    return run(states, job)


def worst(model: Any, samples: list[HiddenSample]) -> float:
    """Largest relative error (of norms) of captured and last states, over samples and layers."""
    found = 0.0
    for s in samples:
        aux, last = truth(model, s.token_ids.tolist())
        pairs = [(s.aux[:, i], aux[:, i]) for i in range(len(LAYER_IDS))] + [(s.last, last[s.last_positions])]
        found = max(found, *(float((a.float() - b).norm() / b.norm()) for a, b in pairs))
    return found


def test_states_equal_transformers_in_one_chunk_and_in_several_alone_and_together(server: Running) -> None:
    lengths = [2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 200, 300, LONGEST]
    documents = [document(n, seed) for seed, n in enumerate(lengths)]
    together = fetch_all(server.client(), server.url, documents)
    assert [len(s) for s in together] == lengths
    assert worst(server.model, together) < 1e-5
    fresh = [document(n, seed + 100) for seed, n in enumerate([5, 3 * CHUNK])]
    assert worst(server.model, [s for d in fresh for s in fetch_all(server.client(), server.url, [d])]) < 1e-5
    assert list((server.folder / "exchange").iterdir()) == []


def test_prompts_whose_prefix_is_cached_have_all_their_states(server: Running) -> None:
    def hits() -> float:
        text = httpx.get(f"{server.url}/metrics", trust_env=False).text
        return sum(float(x) for x in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.M))

    before = hits()
    ids, mask = document(320, 7)
    again = [(ids[:n], mask[:n]) for n in (320, 320, 319, 161, 160, 128, 320)]
    samples = [s for d in again for s in fetch_all(server.client(), server.url, [d])] + fetch_all(server.client(), server.url, again)
    assert hits() > before + 1000, "the prefix cache was not used: this test shows nothing"
    assert worst(server.model, samples) < 1e-5


@pytest.mark.parametrize(("codec", "bound"), [("bf16", 2.0**-8), ("fp8", 2.0**-4)])
def test_codecs_lose_no_more_than_they_may(server: Running, codec: str, bound: float) -> None:
    samples = fetch_all(server.client(codec=codec), server.url, [document(150, 1)])
    assert 1e-5 < worst(server.model, samples) < bound


def test_other_clients_text_and_ours_do_not_disturb_each_other(server: Running) -> None:
    documents = [document(130 + 10 * i, 200 + i) for i in range(6)]

    async def job(states: VllmStates) -> list[HiddenSample]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            body = {"model": str(server.target), "prompt": documents[0][0][:40], "max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
            talk = [http.post(f"{server.url}/v1/completions", json=body) for _ in range(3)]
            samples = [states.fetch(server.url, ids, mask, f"d{i}") for i, (ids, mask) in enumerate(documents)]
            *said, got = await asyncio.gather(*talk, asyncio.gather(*samples))
            assert all(r.json()["usage"]["completion_tokens"] == 30 for r in said)
            assert all(not r.json().get("kv_transfer_params") for r in said)
            return list(got)

    assert worst(server.model, run(server.client(), job)) < 1e-5


def test_a_server_of_other_weights_other_layers_or_for_shorter_documents_is_refused(server: Running, tmp_path: Path) -> None:
    other = weights_digest(str(save_served_target(tmp_path / "other", seed=1)))
    assert other not in (None, weights_digest(str(server.target)))
    ids, mask = document(50, 3)
    with pytest.raises(RecipeError, match="serves other weights"):
        fetch_all(server.client(weights=other), server.url, [(ids, mask)])
    with pytest.raises(RecipeError, match="layer 3 is wanted"):
        fetch_all(server.client(layer_ids=(1, 3)), server.url, [(ids, mask)])
    with pytest.raises(RecipeError, match="refuses: 400"):
        fetch_all(server.client(), server.url, [document(LONGEST + 50, 3)])


def test_a_sample_that_is_damaged_on_its_way_is_found(server: Running) -> None:
    class Damaging(FolderExchange):
        def get(self, handle: str) -> bytes:
            data = bytearray(super().get(handle))
            data[len(data) // 2] ^= 1
            return bytes(data)

    with pytest.raises(HiddenStateError, match="corrupt"):
        fetch_all(server.client(Damaging(server.folder / "exchange")), server.url, [document(50, 3)])
    assert list((server.folder / "exchange").iterdir()) == []


def test_the_stage_makes_the_same_artifact_as_the_local_engine(server: Running, tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.jsonl", 12)
    write_prompts(tmp_path / "eval.jsonl", 4, start=100)
    target = {"model": str(server.target), "layer_ids": list(LAYER_IDS)}
    settings = recipe_settings(tmp_path, target=target, responses={"max_new_tokens": 8}, hidden={"precision": "float32"})
    local = Line(recipe_from_dict(settings), QuietScreen())
    prompts.run(local)
    respond.run(local)
    wanted = extract.run(local)
    there = DiskStore(wanted / "samples", "fp32")
    samples = {key: there.get(key) for key in there.keys()}  # noqa: SIM118 - not a mapping
    index = (wanted / "index.json").read_text()

    served = Line(recipe_from_dict({**settings, "name": "served"}), QuietScreen())
    (served.folder).mkdir(parents=True)
    for name in ("prompts", "responses"):
        (local.folder / name).rename(served.folder / name)
    served.recipe.target.engine, served.recipe.target.endpoints = "vllm", [server.url]
    served.recipe.hidden.exchange = str(server.folder / "exchange")
    assert check_servers(served)[server.url] > 0
    made = extract.run(served)
    assert isinstance(served.target, FrontTarget)
    assert "model" not in vars(served.target), "servers have the layers: they are not loaded here"
    assert (made / "index.json").read_text() == index
    assert made.manifest.about["worst_total_variation"] < 1e-4
    here = DiskStore(made / "samples", "fp32")
    assert here.keys() == sorted(samples)
    for key, a in samples.items():
        b = here.get(key)
        assert (a.target, a.layer_ids) == (b.target, b.layer_ids)
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.loss_mask, b.loss_mask)
        assert torch.equal(a.last_positions, b.last_positions)
        assert float((a.aux - b.aux).norm() / a.aux.norm()) < 1e-5
        assert float((a.last - b.last).norm() / a.last.norm()) < 1e-5
        assert a.last_lognorm is not None
        assert b.last_lognorm is not None
        assert float((a.last_lognorm - b.last_lognorm).abs().max()) < 1e-4
