"""Several ranks on one machine: how much faster they train, what a shard needs, and what saving costs.

speed       one rank with one thread against two ranks with one thread each, the same batch on every rank (DDP, AdamW): `ratio` is batches per
            second of the two over the one's, median of the turns, which alternate.
memory      a DSpark drafter in Kimi-K3's published shape, every width divided by `--scale`: resident memory that training adds to a process, from
            before the drafter is made to the last step, for one process and for each of two FSDP2 ranks. `memory_ratio` is the larger rank's over
            the one process's.
long        one batch of `--long` tokens, one document: one process against two ranks that share it (`train.context_ranks=2`): `long_memory_ratio`
            is the larger rank's peak over the one process's, `long_ratio` its seconds over theirs, `long_loss_difference` the largest relative
            difference of the steps' losses.
checkpoint  two ranks that save all the time, a state as soon as the one before is on disk: `stall` is the share of training that waited for
            saving, `stall_per_save` the seconds of one.

The last line of stdout is one JSON object with all raw figures.

Usage: python benchmarks/parallel.py [--steps 12] [--turns 3] [--scale 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from step_worker import MemoryMeter
from torch import distributed as dist
from torch import multiprocessing, nn

from firesteel import recipe as recipes
from firesteel.batches.packing import BlockLayout
from firesteel.drafters.build import TargetFacts, make_config
from firesteel.drafters.registry import get_spec
from firesteel.evaluation.machine import machine_facts
from firesteel.hidden.sample import HiddenSample, predictable_positions
from firesteel.hidden.stores import MemoryStore
from firesteel.losses.weights import exponential_weights
from firesteel.target.head import TargetHead
from firesteel.training.data import BatchSource, held_out_batches
from firesteel.training.loop import train
from firesteel.training.parallel import World, open_world
from firesteel.training.step import TrainJob
from firesteel.training.tables import make_tables

LAYERS, DOCUMENTS = (2, 9, 16, 23, 28), 8
PARTS = ["speed", "memory", "long", "checkpoint"]


@dataclass(frozen=True)
class Shape:
    """A drafter and its batches."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    markov: int
    tokens: int
    anchors: int
    documents: int = DOCUMENTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=12, help="of a turn; the first is not counted")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=1024, help="of a batch")
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--long", type=int, default=65536, help="tokens of the long batch")
    parser.add_argument("--scale", type=int, choices=[1, 2, 4, 8, 16], default=2, help="what Kimi-K3's widths are divided by; 2 needs 12 GB")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--json", action="store_true", help="only the last line")
    a = parser.parse_args()

    def say(text: str) -> None:
        if not a.json:
            print(text, flush=True)

    w = a.width
    small = Shape(w, 4 * w, 8, 4, w // 8, 1, a.vocab, 64, a.tokens, a.anchors)
    s = a.scale
    kimi = Shape(7168 // s, 14336 // s, max(1, 96 // s), max(1, 16 // s), 64, 5, 163840 // s, max(1, 256 // s), a.tokens // 4, a.anchors // 2)
    found: dict[str, Any] = {}
    if "speed" in a.what:
        paces: dict[int, list[float]] = {1: [], 2: []}
        for turn in range(a.turns):
            for ranks in (1, 2) if turn % 2 == 0 else (2, 1):
                reports = run(ranks, small, {"max_steps": a.steps, "parallel": "ddp", "optimizer": a.optimizer})
                paces[ranks].append(ranks / statistics.median(reports[0]["seconds"]))
                say(f"turn {turn + 1}, {ranks} rank(s): {paces[ranks][-1]:.3f} batches/s")
        ratios = [two / one for one, two in zip(paces[1], paces[2], strict=True)]
        found |= {"ratio": statistics.median(ratios), "ratios": ratios, "batches_per_second": paces}
    if "memory" in a.what:
        peaks = {}
        for ranks in (1, 2):
            reports = run(ranks, kimi, {"max_steps": 3, "parallel": "fsdp", "optimizer": a.optimizer})
            peaks[ranks] = [r["peak"] for r in reports]
            say(f"{ranks} process(es): {', '.join(f'{p / 1e6:.0f}' for p in peaks[ranks])} MB, {reports[0]['parameters'] / 1e6:.1f}M parameters")
        found |= {"memory_ratio": max(peaks[2]) / peaks[1][0], "peak_bytes": peaks, "parameters": reports[0]["parameters"]}
    if "long" in a.what:
        shape = Shape(256, 512, 4, 2, 64, 2, 4096, 32, a.long, a.long // 32, documents=2)
        reports = {n: run(n, shape, {"max_steps": 2, "context_ranks": n, "optimizer": a.optimizer}) for n in (1, 2)}
        peaks, losses = ({n: [r[k] for r in found_] for n, found_ in reports.items()} for k in ("peak", "losses"))
        times = {n: max(statistics.median(r["seconds"]) for r in found_) for n, found_ in reports.items()}
        off = max(abs(x - y) / abs(x) for mine in losses[2] for x, y in zip(losses[1][0], mine, strict=True))
        found |= {"long_memory_ratio": max(peaks[2]) / peaks[1][0], "long_peak_bytes": peaks, "long_ratio": times[1] / times[2]}
        found |= {"long_seconds": times, "long_loss_difference": off}
        told = [f"{times[n]:.1f} s and {max(peaks[n]) / 1e6:.0f} MB" for n in (1, 2)]
        say(f"{a.long} tokens: {told[0]} alone, {told[1]} shared; losses {off:.1e} apart")
    if "checkpoint" in a.what:
        (report, _) = run(2, small, {"max_steps": 2 * a.steps, "parallel": "ddp", "optimizer": a.optimizer, "checkpoint_minutes": 1e-9})
        total = sum(report["seconds"])
        found |= {"stall": report["held"] / total, "stall_per_save": report["held"] / max(1, report["saves"]), "saves": report["saves"]}
        found["step_seconds_while_saving"] = statistics.median(report["seconds"])
        say(f"saving: {report['saves']} states, {100 * found['stall']:.2f}% of training waited")
    found |= {"arguments": vars(a), "load_average": os.getloadavg(), "machine": machine_facts(accelerator=None).model_dump()}
    print(json.dumps(found))


def run(ranks: int, shape: Shape, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank reports of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        multiprocessing.spawn(work, args=(ranks, folder, shape, settings), nprocs=ranks)
        return [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(ranks)]


def work(rank: int, ranks: int, folder: Path, shape: Shape, settings: dict[str, Any]) -> None:
    """One rank, with one thread."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    tables, store = tables_of(shape), store_of(shape)
    meter = MemoryMeter()
    stamps, peaks, losses = [], [], []
    job = job_of(folder / "run", shape, settings, tables, store, open_world(settings.get("context_ranks", 1)))

    def on_step(values: dict[str, Any]) -> None:
        if "done" in values:
            stamps.append(time.perf_counter())
            peaks.append(meter.read()["peak_rss"] - meter.base)
            losses.append(values["loss"])

    job.on_step = on_step
    result = train(job)
    report = {
        "seconds": [b - a for a, b in pairwise(stamps)],
        "peak": peaks[-1],
        "losses": losses,
        "parameters": sum(p.numel() for p in job.drafter.parameters()),
        "held": result.saving,
        "saves": result.saves,
    }
    (folder / f"report{rank}.json").write_text(json.dumps(report))
    if ranks > 1:
        dist.destroy_process_group()


def tables_of(shape: Shape) -> TargetHead:
    torch.manual_seed(0)
    table = torch.randn(shape.vocab, shape.hidden) / shape.hidden**0.5
    return TargetHead(nn.RMSNorm(shape.hidden), table, 1.0, None, table)


def store_of(shape: Shape) -> MemoryStore:
    """Documents that fill a batch each, the first (held out) at most 1,024 tokens, with states of noise: what is in them does not change a step's time."""
    store = MemoryStore("fp32")
    for i in range(shape.documents):
        generator, tokens = torch.Generator().manual_seed(i), shape.tokens if i else min(shape.tokens, 1024)
        ids, mask = torch.randint(shape.vocab, (tokens,), generator=generator), torch.arange(tokens) >= tokens // 4
        positions = predictable_positions(mask)
        aux, last = torch.randn(tokens, len(LAYERS), shape.hidden, generator=generator), torch.randn(len(positions), shape.hidden, generator=generator)
        store.put(HiddenSample(f"d{i}", ids, mask, aux, last, positions, LAYERS, "noise", torch.full((len(positions),), 9.0)))
    return store


def job_of(folder: Path, shape: Shape, settings: dict[str, Any], head: TargetHead, store: MemoryStore, world: World) -> TrainJob:
    facts = TargetFacts(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=max(65536, shape.tokens),
        hidden_act="silu",
        num_layers=30,
    )
    drafter = get_spec("dspark").build(make_config(recipes.Drafter(num_layers=shape.layers, markov_rank=shape.markov), facts, LAYERS, 0))
    c = drafter.config
    layout = BlockLayout(c.block_size, c.sample_from_anchor, exponential_weights(c.block_size, c.sample_from_anchor, 4.0), None)
    keys = [f"d{i}" for i in range(shape.documents)]
    wanted = recipes.Train(**{"batch_tokens": shape.tokens, "anchors": shape.anchors, "validate_every": 10**6, "compile": False, **settings})
    source = BatchSource(store, keys[1:], [shape.tokens] * (shape.documents - 1), layout, batch_tokens=shape.tokens, anchors=shape.anchors, seed=0)
    held_out = held_out_batches(store, keys[:1], layout, batch_tokens=shape.tokens)
    folder.mkdir(parents=True, exist_ok=True)
    return TrainJob(drafter, make_tables(head, None), source, held_out, wanted, recipes.Loss(), folder, (1,), lambda _: None, world)


if __name__ == "__main__":
    main()
