"""Training from a feed beside training from disk, on the same samples: steps per second, and how long training waits.

Servers of their own processes hand the samples out over HTTP, each at a set rate of tokens per second, one request at a time. Both arms
train the same drafter from the same weights over the same batches, in turn; their losses must be equal, bit for bit. The first
step of each turn is not counted. The last line of stdout is one JSON object; `ratio` is the median seconds of a step from disk
over those from the feed, turn by turn, and of the turns the median (1: training does not notice; below: the feed is slower);
`ratios` has the turns, `mean_ratio` is of all steps' means, which a busy moment of the machine moves; `waited` is the share of
its time that the feed's arm spent waiting for samples; `cpu` has the processor seconds of a step, of all the trainer's threads.

Usage: python benchmarks/feed.py [--servers 2] [--rate 4000] [--steps 12] [--turns 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from feed_job import LAYERS, TARGET, Server, Size, make_job, make_works, write_samples
from sample_client import HttpSamples

from firesteel import recipe as recipes
from firesteel.artifact import package_versions
from firesteel.endpoints.roster import Roster
from firesteel.evaluation.machine import machine_facts
from firesteel.hidden.feed import SampleFeed, Work
from firesteel.hidden.sample import check_sample
from firesteel.hidden.stores import DiskStore
from firesteel.stages.stream import last_batch
from firesteel.training.loop import train
from firesteel.training.metrics import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=4000, help="tokens per second of one server")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=384, help="of the middle document")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    a = parser.parse_args()
    if a.threads is not None:
        torch.set_num_threads(a.threads)
    size = Size(a.documents, a.tokens, a.width, a.vocab, a.batch_tokens, a.anchors)
    works = make_works(size)
    seconds: dict[str, list[float]] = {"disk": [], "feed": []}
    losses: dict[str, list[list[float]]] = {"disk": [], "feed": []}
    cpu: dict[str, list[float]] = {"disk": [], "feed": []}
    waited, counts = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = write_samples(folder / "samples", works, size)
        servers = [Server(store.folder, rate=a.rate, seed=i) for i in range(a.servers)]
        try:
            for turn in range(a.turns):
                for arm in ("disk", "feed") if turn % 2 == 0 else ("feed", "disk"):
                    found = run(arm, folder / f"{arm}{turn}", store, works, size, a.steps, [s.url for s in servers])
                    seconds[arm] += found["seconds"]
                    losses[arm].append(found["losses"])
                    cpu[arm].append(found["cpu"])
                    if arm == "feed":
                        waited.append(found["waited"])
                        counts = found["counts"]
                    print(f"turn {turn + 1}, {arm}: {1 / mean(found['seconds']):.3f} steps/s, waited {found['waited']:.3f} s")
        finally:
            for server in servers:
                server.kill()
    pace = {arm: 1 / mean(values) for arm, values in seconds.items()}
    ratios = [statistics.median(disk) / statistics.median(feed) for disk, feed in zip(*(turns_of(seconds[arm], a.turns) for arm in seconds), strict=True)]
    result = {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "mean_ratio": pace["feed"] / pace["disk"],
        "waited": sum(waited) / sum(seconds["feed"]),
        "same_losses": len({json.dumps(curve) for curves in losses.values() for curve in curves}) == 1,
        "steps_per_second": pace,
        "cpu": {arm: mean(values) for arm, values in cpu.items()},
        "tokens_per_second_offered": a.servers * a.rate,
        "seconds": seconds,
        "counts": counts,
        "arguments": vars(a),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "versions": package_versions(),
        "machine": machine_facts(accelerator=None).model_dump(),
    }
    print(json.dumps(result))


def run(arm: str, folder: Path, store: DiskStore, works: list[Work], size: Size, steps: int, urls: list[str]) -> dict[str, Any]:
    """One turn of one arm: seconds of the steps after the first, losses, seconds waited in them."""
    settings = recipes.Train(max_steps=steps, batch_tokens=size.batch_tokens, anchors=size.anchors, validate_every=10**6, compile=False)
    client, stamps, losses, waits, cpu = HttpSamples(), [], [], [], []
    samples: DiskStore | SampleFeed = store
    if arm == "feed":
        check = partial(check_sample, layer_ids=LAYERS, target=TARGET)
        longest = max(size.batch_tokens, max(len(w.token_ids) for w in works))
        samples = SampleFeed(client.fetch, works, Roster(urls), recipes.Feed(), step_tokens=longest, check=check, finish=client.finish)

    def on_step(values: dict[str, Any]) -> None:
        if "loss" in values:
            stamps.append(time.perf_counter())
            cpu.append(time.process_time())
            losses.append(values["loss"])
            waits.append(job.source.waited)

    job = make_job(folder, samples, store, works, size, settings, on_step)
    if isinstance(samples, SampleFeed):
        samples.stop = last_batch(settings, job.source.per_epoch)
    try:
        train(job)
    finally:
        job.source.close()
    assert read_metrics(folder / "metrics.jsonl")[-1]["kind"] == "validation"
    between = [b - a for a, b in pairwise(stamps)]
    work = (cpu[-1] - cpu[0]) / len(between)
    return {"seconds": between, "losses": losses, "waited": waits[-1] - waits[0], "cpu": work, "counts": job.source.report()}


def turns_of(values: list[float], turns: int) -> list[list[float]]:
    """The steps of each turn."""
    length = len(values) // turns
    return [values[i * length : (i + 1) * length] for i in range(turns)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
