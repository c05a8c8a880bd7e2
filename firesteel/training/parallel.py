"""The processes that train together: who is who among them, and the few things that they tell each other.

A run has `size` processes (torchrun's WORLD_SIZE). With `context` above 1 that many neighbouring ranks share every batch and divide its
anchors among them; otherwise each rank has batches of its own. Whatever is summed is summed over all ranks, so no other code
needs to know which is the case.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from firesteel.batches.share import Share
from firesteel.errors import RecipeError

T = TypeVar("T")
_PATIENCE = timedelta(days=1)  # that a rank waits for another: one may read all samples, or measure speed, for the others; a dead rank is noticed at once
_ABSENT = object()


@dataclass(frozen=True)
class World:
    """This process and the others; alone by default, and then nothing is sent.

    Attributes:
        rank: number of this process, 0 .. size - 1. Rank 0 writes and speaks for all.
        size: processes.
        context: ranks that share a batch; divides `size`.
        share: this rank's part of every batch, where `context` is above 1.
    """

    rank: int = 0
    size: int = 1
    context: int = 1
    share: Share | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of a step's batches is this rank's, 0 .. data_size - 1."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        """How many batches are in work at once."""
        return self.size // self.context

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks, in float64; the same bits on every rank."""
        if self.size == 1:
            return list(values)
        held = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(held)
        return held.tolist()

    def tell(self, value: T) -> T:
        """Rank 0's value, on every rank. It is pickled."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def collect(self, values: Sequence[T]) -> list[T]:
        """All ranks' values, dealt out in turn: the first of every rank, the second of every rank and so on. They are pickled."""
        if self.size == 1:
            return list(values)
        held: list[Any] = [None] * self.size
        dist.all_gather_object(held, list(values))
        return [value for turn in zip_longest(*held, fillvalue=_ABSENT) for value in turn if value is not _ABSENT]

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            dist.barrier()


ALONE = World()


def launched_size() -> int:
    """Processes of the launch that this one belongs to, by the environment that torchrun sets; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def open_world(context: int = 1) -> World:
    """Join the other processes of a launch: gloo on CPUs, NCCL beside it on CUDA devices, of which rank r of a machine takes the r-th.

    Several machines under one elastic torchrun need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 to restart, since their restarts are counted apart.

    Args:
        context: ranks that share a batch, `train.context_ranks`.

    Raises:
        RecipeError: `context` does not divide the number of processes.
    """
    size = dist.get_world_size() if dist.is_initialized() else launched_size()
    if size % context:
        raise RecipeError(
            f"train.context_ranks={context} does not divide the {size} process{'es' if size > 1 else ''} of this run",
            mend=f"start a multiple of {context} processes (torchrun --nproc-per-node), or set train.context_ranks to a divisor of {size}",
        )
    if size == 1:
        return ALONE
    if not dist.is_initialized():
        accelerated = torch.cuda.is_available()
        if accelerated:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        store, rank, size = next(dist.rendezvous("env://", timeout=_PATIENCE))
        # torchrun's agents keep one store through all restarts, in which the addresses of ranks that are gone would be taken for ours.
        life = dist.PrefixStore(f"firesteel/{_life()}", store)
        dist.init_process_group("cpu:gloo,cuda:nccl" if accelerated else "gloo", store=life, rank=rank, world_size=size, timeout=_PATIENCE)
    rank = dist.get_rank()
    if context == 1:
        return World(rank, size)
    # Every rank takes part in making every group.
    groups = [dist.new_group(list(range(first, first + context))) for first in range(0, size, context)]
    return World(rank, size, context, Share(rank % context, context, groups[rank // context]))


def _life() -> str:
    """What tells this start of a launch from the ones before it."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "0"


def close_world() -> None:
    """Leave the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()
