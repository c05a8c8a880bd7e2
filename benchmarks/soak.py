"""Training from a feed for as long as is asked, while everything goes wrong: servers are killed and started again, one answer in a hundred is corrupt,
endpoints are removed and added, the Mooncake master is restarted. Nothing may grow, nothing may stop, no sample may be trained on more often than it may.

`--exchange mooncake` (or `folder`): servers (states_server.py) do what vLLM with Firesteel's connector does, less the target: the connector's own writer
puts the states into a real Mooncake store, whose master is started here and restarted once, and the trainer's own client fetches them. `--exchange http`:
samples come in the answers of a simpler server (sample_server.py). Servers run as processes of their own. The troubles lie at even distances; what was
killed comes back after `--down` seconds. Memory of trainer, servers and master is read once a second. Writes `soak.json` (with all curves and events) and
`soak.png` to `--out`.

The last line of stdout is one JSON object; `ratio` is the most growth of any process: memory in the last quarter over that in the second one (1: none), of
servers and master since their longest start; `growth`, `server_growth` and `master_growth` are its parts. `uses`, counted where batches go to training:
`max_uses` of a fetched sample, `over_budget` the samples that were used more often than `budget`. Of what grows with or without a feed, part is kept out:
oneDNN's cache of compiled shapes is small (by default it holds 1024), and large blocks are mapped one by one, as training does with a large vocabulary. The
rest is training's own; compare with a run from disk.

Usage: python benchmarks/soak.py MINUTES [--exchange mooncake] [--kills 3] [--servers 3] [--corrupt 0.01] [--out soak]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from feed_job import LAYERS, NUM_LAYERS, TARGET, Server, Size, make_job, make_works, write_samples
from running import MIB, Master, facts
from sample_client import ExchangeSamples, HttpSamples
from soak_parts import Act, CountedFeed, growths, plan_troubles, plot, resident

from firesteel import recipe as recipes
from firesteel.endpoints.roster import FILE, Roster, edit
from firesteel.hidden.sample import check_sample
from firesteel.kernels.memory import map_large_blocks
from firesteel.training.loop import train

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # read at the first product
SIZE = Size(documents=64, tokens=256, width=256, vocab=4096, batch_tokens=1024, anchors=32)
TIMEOUT = 30.0


class Trouble(threading.Thread):
    """Does what is planned, until told to end; and keeps the books on memory."""

    def __init__(self, acts: Sequence[Act], servers: Sequence[Server], master: Master | None, file: Path) -> None:
        super().__init__(daemon=True)
        self.acts, self.servers, self.master, self.file = list(acts), servers, master, file
        self.ending = threading.Event()
        names = ["trainer", *(f"server {i}" for i in range(len(servers))), *(["master"] if master else [])]
        self.memory: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        self.events: list[tuple[float, str]] = []
        self.failed: str | None = None

    def run(self) -> None:
        started = time.monotonic()
        try:
            while not self.ending.wait(1.0):
                now = time.monotonic() - started
                pids = {"trainer": os.getpid(), **{f"server {i}": s.pid for i, s in enumerate(self.servers)}}
                if self.master is not None:
                    pids["master"] = self.master.pid
                for name, pid in pids.items():
                    if (mb := resident(pid)) > 0:
                        self.memory[name].append((now, mb))
                if self.acts and self.acts[0].at <= now:
                    act = self.acts.pop(0)
                    self._do(act)
                    self.events.append((now, f"{act.verb} {act.name}"))
                    print(f"{now:.0f} s: {act.verb} {act.name}", flush=True)
        except BaseException as e:
            self.failed = f"{type(e).__name__}: {e}"
            raise

    def _do(self, act: Act) -> None:
        if act.name == "master":
            assert self.master is not None, "a master is killed only where there is one"
            (self.master.kill if act.verb == "kill" else self.master.start)()
            return
        server = self.servers[int(act.name.split()[1])]
        if act.verb in ("add", "remove"):
            edit(self.file, "add" if act.verb == "add" else "remove", server.url)
        elif act.verb == "kill":
            server.kill()
        else:
            server.start(wait=False)


def exchange(a: argparse.Namespace, folder: Path, master: Master | None, *, segment: bool) -> dict[str, Any]:
    """The exchange, as both ends are told it; `segment`: this end lends memory."""
    if master is None:
        return {"folder": str(folder / "exchange")}
    return {"mooncake": {"master": master.address, "segment": int(segment) * a.segment_mib * MIB, "buffer": a.segment_mib * MIB}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--exchange", choices=["http", "folder", "mooncake"], default="http", help="how samples travel")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--rate", type=float, default=20000, help="tokens per second of one server")
    parser.add_argument("--corrupt", type=float, default=0.01, help="share of the samples that are damaged on their way")
    parser.add_argument("--kills", type=int, default=3, help="times that a server is killed and started again")
    parser.add_argument("--removals", type=int, default=3, help="times that an endpoint is taken off the list and put back")
    parser.add_argument("--down", type=float, default=20.0, help="seconds until what was killed or removed is back")
    parser.add_argument("--uses", type=int, default=1, help="batches that a fetched sample may be used in (hidden.feed.uses)")
    parser.add_argument("--segment-mib", type=int, default=64, help="memory that each server lends to Mooncake")
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--threads", type=int, default=None)
    a = parser.parse_args()
    if a.servers < 2 and a.removals:
        parser.error("--removals needs two servers: with none on the list training has to wait for ever")
    return a


def main() -> None:
    a = parse()
    if a.threads is not None:
        torch.set_num_threads(a.threads)
    map_large_blocks()
    a.out.mkdir(parents=True, exist_ok=True)
    works, steps, waits, losses, alarms = make_works(SIZE), 0, [0.0], [0.0, 0.0], list[str]()
    with tempfile.TemporaryDirectory() as name, Master(a.out / "master.log") if a.exchange == "mooncake" else nullcontext() as master:
        folder = Path(name)
        store = write_samples(folder / "samples", works, SIZE)
        how = {} if a.exchange == "http" else {"script": "states_server.py", "more": ["--exchange", json.dumps(exchange(a, folder, master, segment=True))]}
        servers: list[Server] = []
        file = folder / "run" / FILE
        try:
            servers += [Server(store.folder, rate=a.rate, corrupt=a.corrupt, seed=i, **how) for i in range(a.servers)]
            client = (
                HttpSamples()
                if a.exchange == "http"
                else ExchangeSamples(exchange(a, folder, master, segment=False), layer_ids=LAYERS, num_layers=NUM_LAYERS, target=TARGET, timeout=TIMEOUT)
            )
            keep = 0 if a.uses == 1 else sum(len(w.token_ids) for w in works) // 2
            feed = CountedFeed(
                client.fetch,
                works,
                Roster([s.url for s in servers], file),
                recipes.Feed(backoff_max=5.0, timeout=TIMEOUT, uses=a.uses, keep_tokens=keep),
                step_tokens=SIZE.batch_tokens,
                check=partial(check_sample, layer_ids=LAYERS, target=TARGET),
                finish=client.finish,
            )

            def on_step(values: dict[str, Any]) -> None:
                nonlocal steps
                steps = values.get("step", steps)
                alarms.extend([values["alarm"]] if "alarm" in values else [])
                if "loss" in values:
                    losses[:] = [losses[0] or values["loss"], values["loss"]]
                waits.append(job.source.waited)

            settings = recipes.Train(max_minutes=a.minutes, batch_tokens=SIZE.batch_tokens, anchors=SIZE.anchors, validate_every=10**9, compile=False)
            job = make_job(folder / "train", feed, store, works, SIZE, settings, on_step)
            acts = plan_troubles(60 * a.minutes, servers=a.servers, kills=a.kills, removals=a.removals, master=master is not None, down=a.down)
            trouble = Trouble(acts, servers, master, file)
            trouble.start()
            try:
                result = train(job)
            finally:
                counts = job.source.report()
                job.source.close()
                trouble.ending.set()
                trouble.join()
        finally:
            for server in servers:
                server.kill()
    if trouble.failed is not None:
        raise SystemExit(f"the troubles ended early: {trouble.failed}")
    grown = growths(trouble.memory, trouble.events)
    found = {
        "benchmark": "soak",
        "ratio": max(grown.values()),
        "growth": grown["trainer"],
        "server_growth": max(value for process, value in grown.items() if process.startswith("server")),
        "master_growth": grown.get("master"),
        "uses": feed.uses.report(),
        "steps": steps,
        "steps_per_second": steps / result.progress.seconds,
        "minutes": result.progress.seconds / 60,
        "losses": losses,
        "alarms": alarms,
        "waited_share": waits[-1] / result.progress.seconds,
        "longest_wait": max((later - earlier for earlier, later in pairwise(waits)), default=0.0),
        "epochs": job.source.epoch_of(result.progress.batch),
        "counts": counts,
        "kills": sum(what.startswith("kill server") for _, what in trouble.events),
        "master_restarts": sum(what == "start master" for _, what in trouble.events),
        "events": trouble.events,
        "not_done": [f"{act.verb} {act.name}" for act in trouble.acts],
        "arguments": {k: str(v) for k, v in vars(a).items()},
        **facts(),
    }
    (a.out / "soak.json").write_text(json.dumps({**found, "memory": trouble.memory}))
    plot(trouble.memory, trouble.events, a.out / "soak.png")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
