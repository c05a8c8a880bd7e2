"""Training from a feed for as long as is asked, while everything goes wrong: servers are killed and started again, one answer in
a hundred is corrupt, endpoints are removed and added. Nothing may grow, nothing may stop.

Servers (sample_server.py) run as processes of their own. About every `--every` seconds one of them is killed, or one that lies down
is started; now and then one is taken off the list of endpoints or put back. Memory of trainer and servers is read once a second.
Writes `soak.json` and `soak.png` to `--out`. The last line of stdout is one JSON object; `growth` is the trainer's memory in
the last quarter over that in the second one (1: none), `server_growth` the most of any server since its last start. Of what
grows with or without a feed, part is kept out: oneDNN's cache of compiled shapes is small (by default it holds 1024), and large
blocks are mapped one by one, as training does with a large vocabulary. The rest is training's own; compare with a run from disk.

Usage: python benchmarks/soak.py MINUTES [--servers 3] [--corrupt 0.01] [--out soak]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
from feed_job import LAYERS, TARGET, Server, Size, make_job, make_works, write_samples
from sample_client import HttpSamples

from firesteel import recipe as recipes
from firesteel.endpoints.roster import FILE, Roster, edit, read_urls
from firesteel.evaluation.machine import machine_facts
from firesteel.hidden.feed import SampleFeed
from firesteel.hidden.sample import check_sample
from firesteel.kernels.memory import map_large_blocks
from firesteel.training.loop import train

matplotlib.use("Agg")
import matplotlib.pyplot as plt

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # read at the first product
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Trouble(threading.Thread):
    """Kills, starts, removes and adds servers until told to end; and keeps the books on memory."""

    def __init__(self, servers: list[Server], file: Path, every: float) -> None:
        super().__init__(daemon=True)
        self.servers, self.file, self.every = servers, file, every
        self.ending = threading.Event()
        self.memory: dict[str, list[tuple[float, float]]] = {"trainer": [], **{f"server {i}": [] for i in range(len(servers))}}
        self.events: list[tuple[float, str]] = []
        self.started = time.monotonic()
        self._chance = random.Random(0)

    def run(self) -> None:
        due = self.every
        while not self.ending.wait(1.0):
            now = time.monotonic() - self.started
            self.memory["trainer"].append((now, resident(os.getpid())))
            for i, server in enumerate(self.servers):
                if server.alive:
                    self.memory[f"server {i}"].append((now, resident(server.pid)))
            if now > due:
                due = now + self._chance.uniform(0.5, 1.5) * self.every
                self.events.append((now, self._act()))

    def _act(self) -> str:
        i = self._chance.randrange(len(self.servers))
        server, up = self.servers[i], sum(s.alive for s in self.servers)
        if not server.alive:
            server.start()
            return f"server {i} started"
        listed = read_urls(self.file)
        if self._chance.random() < 0.3:
            if server.url not in listed:
                edit(self.file, "add", server.url)
                return f"server {i} added"
            if len(listed) > 1:
                edit(self.file, "remove", server.url)
                return f"server {i} removed"
        # Sometimes all are down for a while.
        if up > 1 or self._chance.random() < 0.3:
            server.kill()
            return f"server {i} killed"
        return "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--rate", type=float, default=20000, help="tokens per second of one server")
    parser.add_argument("--corrupt", type=float, default=0.01)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between troubles")
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--threads", type=int, default=None)
    a = parser.parse_args()
    if a.threads is not None:
        torch.set_num_threads(a.threads)
    map_large_blocks()
    size = Size(documents=64, tokens=256, width=256, vocab=4096, batch_tokens=1024, anchors=32)
    works, steps, waits = make_works(size), 0, [0.0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = write_samples(folder / "samples", works, size)
        servers = [Server(store.folder, rate=a.rate, corrupt=a.corrupt, seed=i) for i in range(a.servers)]
        file, client = folder / "run" / FILE, HttpSamples()
        feed = SampleFeed(
            client.fetch,
            works,
            Roster([s.url for s in servers], file),
            recipes.Feed(backoff_max=5.0, timeout=30.0),
            step_tokens=size.batch_tokens,
            check=partial(check_sample, layer_ids=LAYERS, target=TARGET),
            finish=client.finish,
        )

        def on_step(values: dict[str, Any]) -> None:
            nonlocal steps
            steps = values["step"]
            waits.append(job.source.waited)

        settings = recipes.Train(max_minutes=a.minutes, batch_tokens=size.batch_tokens, anchors=size.anchors, validate_every=10**9, compile=False)
        job = make_job(folder / "train", feed, store, works, size, settings, on_step)
        trouble = Trouble(servers, file, a.every)
        trouble.start()
        try:
            result = train(job)
        finally:
            counts = job.source.report()
            job.source.close()
            trouble.ending.set()
            trouble.join()
            for server in servers:
                server.kill()
    growth = quarters(trouble.memory["trainer"])
    since = [quarters(after_start(rows, trouble.events, name)) for name, rows in trouble.memory.items() if name != "trainer"]
    found = {
        "growth": growth,
        "server_growth": max(since),
        "steps": steps,
        "steps_per_second": steps / result.progress.seconds,
        "waited_share": waits[-1] / result.progress.seconds,
        "longest_wait": max(later - earlier for earlier, later in pairwise(waits)),
        "epochs": job.source.epoch_of(result.progress.batch),
        "counts": counts,
        "troubles": len(trouble.events),
        "arguments": {k: str(v) for k, v in vars(a).items()},
        "machine": machine_facts(accelerator=None).model_dump(),
    }
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "soak.json").write_text(json.dumps({**found, "memory": trouble.memory, "events": trouble.events}))
    plot(trouble, a.out / "soak.png")
    print(json.dumps(found))


def resident(pid: int) -> float:
    """Megabytes of memory that a process holds; 0 if it has just gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6
    except (OSError, IndexError):
        return 0.0


def quarters(rows: list[tuple[float, float]]) -> float:
    """Median of the last quarter over that of the second one; 1 where there is too little to tell."""
    values = [mb for _, mb in rows if mb > 0]
    n = len(values) // 4
    return statistics.median(values[3 * n :]) / statistics.median(values[n : 2 * n]) if n >= 3 else 1.0


def after_start(rows: list[tuple[float, float]], events: list[tuple[float, str]], name: str) -> list[tuple[float, float]]:
    """The rows since the longest-lived start of a server (the stretch between two starts with most rows)."""
    cuts = [0.0, *(t for t, what in events if what == f"{name} started"), float("inf")]
    return max(([r for r in rows if low <= r[0] < high] for low, high in pairwise(cuts)), key=len)


def plot(trouble: Trouble, path: Path) -> None:
    """Memory over time, troubles as marks."""
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(9, 6))
    for name, rows in trouble.memory.items():
        axis = upper if name == "trainer" else lower
        axis.plot([t / 60 for t, _ in rows], [mb for _, mb in rows], ".", markersize=2, label=name)
    for t, what in trouble.events:
        if what.endswith("killed"):
            lower.axvline(t / 60, color="0.9", zorder=0)
    upper.set(ylabel="trainer, MB", ylim=(0, None), title="memory; grey: a server was killed")
    lower.set(ylabel="servers, MB", ylim=(0, None), xlabel="minutes")
    lower.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
