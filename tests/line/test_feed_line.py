"""Training cannot tell where its samples come from: disk, memory or a feed give the same losses and weights, bit for bit."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from line_screen import QuietScreen
from safetensors.torch import load_file
from tiny_target import recipe_settings

from firesteel.cli.runner import LINE
from firesteel.endpoints.roster import read_urls
from firesteel.errors import RecipeError
from firesteel.hidden.feed import Fetch, SampleFeed, Work
from firesteel.hidden.sample import HiddenSample
from firesteel.hidden.stores import DiskStore
from firesteel.recipe import recipe_from_dict
from firesteel.stages import states, stream
from firesteel.stages.line import Line
from firesteel.training import step
from firesteel.training.metrics import read_metrics

MakeLine = Callable[..., Line]
STEPS = {"max_steps": 16, "validate_every": 8, "batch_tokens": 96, "anchors": 16, "accumulate": 2, "lr": 3e-3, "compile": False}


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r.get("grad_norm", 0.0)) for r in read_metrics(folder / "metrics.jsonl")]


def walk(line: Line, stages: int = 4) -> Path:
    for _, stage in LINE[:stages]:
        stage(line)
    return line.folder / "train"


def shuffled(folder: Path) -> Fetch:
    """Samples of a disk store, arriving in any order."""
    store, chance = DiskStore(folder, "fp32"), random.Random(1)

    async def fetch(endpoint: str, work: Work) -> HiddenSample:
        await asyncio.sleep(chance.uniform(0, 0.004))
        return store.get(work.key)

    return fetch


@pytest.fixture(scope="module")
def disk(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    settings = recipe_settings(base_folder, train=STEPS) | {"runs_dir": str(tmp_path_factory.mktemp("disk"))}
    line = Line(recipe_from_dict(settings), QuietScreen())
    walk(line)
    return line


def stream_line(make_line: MakeLine, name: str, **feed: object) -> Line:
    line = make_line(train=STEPS, hidden={"store": "stream", "feed": feed})
    line.recipe.name = name
    return line


def test_disk_memory_and_feed_give_the_same_curve(make_line: MakeLine, disk: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_line(train=STEPS, hidden={"store": "memory"})
    memory.recipe.name = "memory"
    walk(memory)
    fetch = shuffled(disk.folder / "hidden" / "samples")
    monkeypatch.setattr(stream, "local_fetch", lambda line: fetch)
    lines = [memory]
    for name, feed in (("feed", {}), ("again", {"uses": 3, "keep_tokens": 600, "low_tokens": 250, "high_tokens": 300})):
        lines.append(stream_line(make_line, name, **feed))
        walk(lines[-1])
    wanted = load_file(disk.folder / "train" / "best.safetensors")
    for line in lines:
        assert losses(line.folder / "train") == losses(disk.folder / "train")
        found = load_file(line.folder / "train" / "best.safetensors")
        assert all(found[key].equal(tensor) for key, tensor in wanted.items())
    assert not list((lines[1].folder / "hidden").glob("samples"))
    records = [r for r in read_metrics(lines[1].folder / "train" / "metrics.jsonl") if r["kind"] == "train"]
    assert records[-1]["waited"] > 0
    assert 0 < records[-1]["feed_peak_tokens"] <= 4 * 2 * 96
    once, thrice = (read_metrics(line.folder / "train" / "metrics.jsonl")[-2]["feed_answers"] for line in lines[1:])
    assert thrice < once, "kept samples need not be fetched again"


def test_a_run_on_a_feed_resumes_bit_for_bit(make_line: MakeLine, disk: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = shuffled(disk.folder / "hidden" / "samples")
    monkeypatch.setattr(stream, "local_fetch", lambda line: fetch)
    line, real, calls = stream_line(make_line, "broken"), step.compute_loss, []

    def failing(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 25:
            raise RuntimeError("power cut")
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "compute_loss", failing)
    with pytest.raises(RuntimeError, match="power cut"):
        walk(line)
    assert not any(t.name == "feed" for t in threading.enumerate()), "what training opened is closed"
    monkeypatch.setattr(step, "compute_loss", real)
    assert losses(walk(line)) == losses(disk.folder / "train")


def test_servers_of_the_recipe_are_asked_and_may_change(make_line: MakeLine, disk: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """With target.engine=vllm: the client is the one of `stages.states`, the servers are those of the recipe, in a file of the run."""
    fetch, asked, closed = shuffled(disk.folder / "hidden" / "samples"), set(), []

    class Client:
        exchange = SimpleNamespace(close=lambda: closed.append("exchange"))

        async def fetch(self, endpoint: str, token_ids: list[int], loss_mask: list[bool], key: str) -> HiddenSample:
            asked.add(endpoint)
            return await fetch(endpoint, Work(key, token_ids, loss_mask))

        async def close(self) -> None:
            closed.append("client")

    line = stream_line(make_line, "vllm")
    walk(line, 3)
    line.recipe.target.engine, line.recipe.target.endpoints = "vllm", ["http://a:1", "http://b:2"]
    monkeypatch.setattr(states, "open_states", lambda line: Client())
    LINE[3][1](line)
    assert losses(line.folder / "train") == losses(disk.folder / "train")
    assert asked == {"http://a:1", "http://b:2"}
    assert read_urls(line.folder / "endpoints.txt") == ["http://a:1", "http://b:2"]
    assert closed == ["client", "exchange"] * 2  # one feed for held-out documents, one for training


@pytest.mark.parametrize("uses", [1, 2])
def test_no_sample_is_trained_beyond_its_budget(make_line: MakeLine, disk: Line, monkeypatch: pytest.MonkeyPatch, uses: int) -> None:
    fetch = shuffled(disk.folder / "hidden" / "samples")
    monkeypatch.setattr(stream, "local_fetch", lambda line: fetch)
    trained: list[HiddenSample] = []  # kept, so that identities stay apart
    real = SampleFeed.take

    def take(self: SampleFeed, number: int, plan: Callable[[int], list[int]]) -> list[HiddenSample]:
        trained.extend(samples := real(self, number, plan))
        return samples

    monkeypatch.setattr(SampleFeed, "take", take)
    walk(stream_line(make_line, f"uses{uses}", **({"uses": uses, "keep_tokens": 5000} if uses > 1 else {})))
    counts = Counter(map(id, trained))
    assert max(counts.values()) == uses
    assert len(trained) > 30


def test_the_whole_line_streams_from_the_target_in_this_process(make_line: MakeLine) -> None:
    line = stream_line(make_line, "local")
    line.recipe.drafter.draft_vocab_size = 48
    walk(line, stages=6)
    assert (line.folder / "package" / "model.safetensors").is_file()
    assert not list(line.folder.rglob("samples"))


def test_a_low_mark_below_one_step_is_refused_with_both_values(make_line: MakeLine) -> None:
    with pytest.raises(RecipeError, match="low_tokens=100 is below the 192 tokens"):
        walk(stream_line(make_line, "deadlock", low_tokens=100))
