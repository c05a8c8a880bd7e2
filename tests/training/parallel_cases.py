"""Small training jobs for one process or several, and processes to run them in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing, nn

from firesteel import recipe as recipes
from firesteel.batches.packing import BlockLayout
from firesteel.drafters.build import TargetFacts, make_config
from firesteel.drafters.registry import get_spec
from firesteel.hidden.sample import HiddenSample, predictable_positions
from firesteel.hidden.stores import MemoryStore
from firesteel.losses.weights import exponential_weights
from firesteel.target.head import TargetHead
from firesteel.training.data import BatchSource, held_out_batches
from firesteel.training.loop import train
from firesteel.training.parallel import ALONE, World, open_world
from firesteel.training.step import TrainJob
from firesteel.training.tables import make_tables

WIDTH, VOCAB, LAYERS = 32, 64, (1, 2, 4)
# What the tests train, by a name of the tests' own.
DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark": {"num_layers": 2, "markov_rank": 8},
    "dflash2": {"num_layers": 1},
    "eagle3": {"num_layers": 1},
    "peagle": {"num_layers": 2},
    "latent": {"algorithm": "dspark", "backbone": "mla", "num_layers": 1, "markov_rank": 8},
}
STEPS = {"max_steps": 6, "validate_every": 3, "batch_tokens": 96, "anchors": 16, "lr": 3e-3, "muon_lr": 0.02, "compile": False, "precision": "float32"}
FACTS = TargetFacts(
    hidden_size=WIDTH,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=512,
    hidden_act="silu",
    num_layers=6,
)


def samples(count: int) -> list[HiddenSample]:
    """Documents of 20 to 60 tokens with states that tell something of the next token."""
    found = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        length = 20 + (17 * i) % 41
        ids, mask = torch.randint(VOCAB, (length,), generator=generator), torch.arange(length) >= 4
        positions = predictable_positions(mask)
        aux = torch.randn(length, len(LAYERS), WIDTH, generator=generator)
        last = torch.randn(len(positions), WIDTH, generator=generator)
        found.append(HiddenSample(f"d{i}", ids, mask, aux, last, positions, LAYERS, "toy", torch.full((len(positions),), 9.0)))
    return found


def make_job(folder: Path, algorithm: str = "dspark", world: World = ALONE, loss: dict[str, Any] | None = None, **settings: Any) -> TrainJob:
    """A job of five or so batches an epoch; `settings` are those of the recipe's section `train`."""
    drafter_settings = recipes.Drafter(**{"algorithm": algorithm, "block_size": 4, **DRAFTERS[algorithm]})
    torch.manual_seed(0)
    table = torch.randn(VOCAB, WIDTH) / WIDTH**0.5
    drafter = get_spec(drafter_settings.algorithm).build(make_config(drafter_settings, FACTS, LAYERS, 0))
    c = drafter.config
    layout = BlockLayout(c.block_size, c.sample_from_anchor, exponential_weights(c.block_size, c.sample_from_anchor, 4.0), None)
    store, documents = MemoryStore("fp32"), samples(14)
    for sample in documents:
        store.put(sample)
    wanted = recipes.Train(**{**STEPS, **settings})
    training = [s.key for s in documents[:11]]
    source = BatchSource(store, training, [len(s) for s in documents[:11]], layout, batch_tokens=wanted.batch_tokens, anchors=wanted.anchors, seed=0)
    head = TargetHead(nn.RMSNorm(WIDTH), table, 1.0, None, table)
    held_out = held_out_batches(store, [s.key for s in documents[11:]], layout, batch_tokens=64)
    folder.mkdir(parents=True, exist_ok=True)
    mix = recipes.Loss(**(loss or {"ce": 0.5, "tv": 0.5}))
    job = TrainJob(drafter, make_tables(head, None), source, held_out, wanted, mix, folder, (1,), lambda _: None, world)
    job.settings = {"train": {"lr": wanted.lr}}
    return job


def train_here(folder: Path, algorithm: str, settings: dict[str, Any]) -> None:
    """Train in this process, or in all of those that `launch` started."""
    train(make_job(folder, algorithm, open_world(int(settings.get("context_ranks", 1))), **settings))


def launch(count: int, work: Callable[..., None], *args: Any) -> None:
    """Run `work(*args)` in `count` processes that know each other; raises what the first failing one raised."""
    # Forked from a process that has imported all of it: a new interpreter for every rank takes longer than most of the tests.
    multiprocessing.set_forkserver_preload(["firesteel.stages.train"])
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(_run, args=(count, f"{folder}/meet", work, args), nprocs=count, start_method="forkserver")


def _run(rank: int, count: int, meet: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=count)
    work(*args)
    dist.destroy_process_group()
