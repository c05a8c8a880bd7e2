"""What the benchmarks of the feed train on: made-up documents and states on disk, a drafter, and servers that hand the states out.

The states are noise: the time of a step does not depend on what is in them, and neither does the transport.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from firesteel import recipe as recipes
from firesteel.batches.packing import BlockLayout
from firesteel.drafters.build import TargetFacts, make_config
from firesteel.drafters.registry import get_spec
from firesteel.hidden.feed import SampleFeed, Work
from firesteel.hidden.sample import HiddenSample, predictable_positions
from firesteel.hidden.stores import DiskStore
from firesteel.losses.weights import exponential_weights
from firesteel.target.head import TargetHead
from firesteel.training.data import BatchSource, held_out_batches
from firesteel.training.step import TrainJob
from firesteel.training.tables import make_tables

HERE = Path(__file__).resolve().parent
LAYERS, NUM_LAYERS, TARGET = (2, 9, 16, 23, 28), 30, "made-up"


@dataclass(frozen=True)
class Size:
    """How large everything is: documents, tokens of the middle one, width and vocabulary of the target, tokens and anchors of a batch."""

    documents: int
    tokens: int
    width: int
    vocab: int
    batch_tokens: int
    anchors: int


def make_works(size: Size) -> list[Work]:
    """Documents of half to one and a half times `size.tokens`; the first quarter of each is its prompt."""
    works = []
    for i in range(size.documents):
        generator = torch.Generator().manual_seed(i)
        length = size.tokens // 2 + (size.tokens * i) // size.documents
        ids = torch.randint(size.vocab, (length,), generator=generator).tolist()
        works.append(Work(f"document{i}", ids, [j >= length // 4 for j in range(length)]))
    return works


def write_samples(folder: Path, works: list[Work], size: Size) -> DiskStore:
    """Their states, as `firesteel extract` stores them; what is there already stays."""
    store = DiskStore(folder, "bf16")
    for i, work in enumerate(works):
        if work.key not in store:
            mask, generator = torch.tensor(work.loss_mask), torch.Generator().manual_seed(i)
            positions = predictable_positions(mask)
            aux = torch.randn(len(mask), len(LAYERS), size.width, generator=generator)
            last = torch.randn(len(positions), size.width, generator=generator)
            store.put(HiddenSample(work.key, torch.tensor(work.token_ids), mask, aux, last, positions, LAYERS, TARGET, torch.full((len(positions),), 9.0)))
    return store


def make_job(
    folder: Path,
    samples: DiskStore | SampleFeed,
    held_out: DiskStore,
    works: list[Work],
    size: Size,
    train: recipes.Train,
    on_step: Callable[[dict[str, Any]], None],
) -> TrainJob:
    """A training job in `folder`; every call begins from the same weights."""
    facts = TargetFacts(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_heads=8,
        num_kv_heads=4,
        head_dim=size.width // 8,
        vocab_size=size.vocab,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=8192,
        hidden_act="silu",
        num_layers=NUM_LAYERS,
    )
    torch.manual_seed(0)
    table = torch.randn(size.vocab, size.width) / size.width**0.5
    drafter = get_spec("dspark").build(make_config(recipes.Drafter(num_layers=1, markov_rank=64), facts, LAYERS, 0))
    c = drafter.config
    layout = BlockLayout(c.block_size, c.sample_from_anchor, exponential_weights(c.block_size, c.sample_from_anchor, 4.0), None)
    source = BatchSource(
        samples, [w.key for w in works], [len(w.token_ids) for w in works], layout, batch_tokens=size.batch_tokens, anchors=size.anchors, seed=0
    )
    head = TargetHead(nn.RMSNorm(size.width), table, 1.0, None, table)
    batches = held_out_batches(held_out, [works[0].key], layout, batch_tokens=size.batch_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    return TrainJob(drafter, make_tables(head, None), source, batches, train, recipes.Loss(), folder, (1,), on_step)


class Server:
    """A process that hands out samples (sample_server.py, or another script that takes the same arguments and `more`)."""

    def __init__(
        self, folder: Path, *, rate: float, corrupt: float = 0.0, seed: int = 0, port: int = 0, script: str = "sample_server.py", more: Sequence[str] = ()
    ) -> None:
        arguments = ["--rate", str(rate), "--corrupt", str(corrupt), "--seed", str(seed), *more]
        self._command, self._arguments = [sys.executable, str(HERE / script)], [str(folder), *arguments]
        self.port = port
        self.start()

    def start(self, *, wait: bool = True) -> None:
        """Start it, at the port that it had; `wait`: until it answers."""
        self._process = subprocess.Popen([*self._command, str(self.port), *self._arguments], stdout=subprocess.PIPE, text=True)
        if not wait:
            return
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            raise SystemExit(f"{' '.join(self._command)} ended with status {self._process.wait()}; what it said is above")
        self.port = int(said)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
