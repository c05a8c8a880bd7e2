"""The drafter as a run of several processes trains it: a copy that stays equal to the others (DDP), or a shard of one (FSDP2).

Both hook into an ordinary forward pass whose result is a tensor, so the whole loss of a batch is made one (`LossModule`). Gradients are
summed over ranks, not averaged: the loss is divided by what all ranks' slots weigh together, see `step.gradients`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from firesteel.batches.batch import Batch
from firesteel.drafters.latent import LatentLayer
from firesteel.drafters.layers import MLP, DraftLayer, Projection
from firesteel.losses.types import LossResult, LossWeights
from firesteel.training.parallel import World

# The loss of a batch and confidence logits, by (batch, weights, denominator).
Loss = Callable[[Batch, LossWeights, float | None], tuple[LossResult, Tensor | None]]

# What is only ever run through its forward pass, so that its parameters may come and go around it: a part at a time where memory is short
# and nothing overlaps anyway, a layer at a time where each gathering costs a launch.
_PARTS, _LAYERS = (Projection, DraftLayer, LatentLayer), (MLP, DraftLayer, LatentLayer)


def wants_shards(parallel: str, drafter: nn.Module, device: torch.device, world: World) -> bool:
    """What a recipe's `train.parallel` (auto, ddp, fsdp) means: `auto` shards a drafter whose weights, gradients and two moments would fill more
    than a quarter of a rank's memory. Rank 0 decides."""
    if parallel != "auto":
        return parallel == "fsdp"
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return world.tell(4 * sum(p.numel() * p.element_size() for p in drafter.parameters()) > memory / 4)


class LossModule(nn.Module):
    """A drafter together with its loss. What the loss was made of is left in `found`."""

    def __init__(self, drafter: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.drafter = drafter
        self._loss = loss
        self.found: tuple[LossResult, Tensor | None] | None = None

    def forward(self, batch: Batch, weights: LossWeights, denominator: float | None) -> Tensor:
        """The loss of a batch, a scalar."""
        self.found = self._loss(batch, weights, denominator)
        return self.found[0].loss


class Replica:
    """A drafter that is trained by all ranks of a world.

    Args:
        drafter: the same on every rank. With `sharded` its parameters become DTensors in place.
        sharded: FSDP2: parameters, gradients and with them the optimizer's state are divided among the ranks by rows; a layer is whole
            only while it computes. Otherwise DDP: every rank has all of it.
    """

    def __init__(self, drafter: nn.Module, loss: Loss, *, sharded: bool, device: torch.device, world: World) -> None:
        self.losses, self.sharded = LossModule(drafter, loss), sharded
        if sharded:
            mesh = init_device_mesh(device.type, (world.size,))
            for module in reversed(list(drafter.modules())):  # parts before what they are parts of
                if isinstance(module, _PARTS if device.type == "cpu" else _LAYERS):
                    fully_shard(module, mesh=mesh)
            # The root too is given back after its forward pass: outside of a step, parameters are always shards.
            fully_shard(self.losses, mesh=mesh, reshard_after_forward=True)
            for module in self.losses.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to divide by one
                    if device.type == "cpu":  # where nothing is gained by gathering the next part ahead; its own is there already
                        module.set_modules_to_backward_prefetch([module])
            self.module: Any = self.losses
        else:
            # A confidence head without a weight in the loss has no gradient on any rank, and then stays as it is.
            self.module = DistributedDataParallel(self.losses, forward_sync_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=True)
            self.module.register_comm_hook(None, lambda _, bucket: _sum(bucket))  # DDP reads annotations, and takes none as strings

    def loss(self, batch: Batch, weights: LossWeights, denominator: float | None, *, last: bool = True) -> tuple[LossResult, Tensor | None]:
        """As `step.compute_loss`. Every rank must call it equally often.

        Args:
            last: False: a backward pass keeps its gradients to this rank, since another of the same step follows. (Shards are reduced
                each time: a rank has no room for whole gradients.)
        """
        if not self.sharded:
            self.module.require_backward_grad_sync = last
        loss = self.module(batch, weights, denominator)
        assert self.losses.found is not None, "set by the forward pass"
        result, confidence = self.losses.found
        self.losses.found = None
        result.loss = loss
        return result, confidence


def _sum(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's reduction of a bucket of gradients: their sum over ranks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None, "asynchronous"
    return work.get_future().then(lambda future: future.value()[0])


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor in CPU memory, whole. With shards a collective: all ranks call it, rank 0 gets the tensors, the others none."""
    found: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, DTensor):
            whole = tensor.full_tensor()
            if dist.get_rank() == 0:
                found[name] = whole.cpu()
        else:
            found[name] = tensor.detach().cpu().contiguous()
    return found


@torch.no_grad()
def load_whole_state(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill a module from whole tensors, which every rank has; shards take their part."""
    own = module.state_dict()
    if not any(isinstance(t, DTensor) for t in own.values()):
        module.load_state_dict(tensors)
        return
    assert own.keys() == tensors.keys(), "a checkpoint of this drafter"
    for name, tensor in own.items():
        value = tensors[name].to(tensor.device)
        tensor.copy_(distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None) if isinstance(tensor, DTensor) else value)


def shares_of(tensor: Tensor, owner: int, like: Tensor) -> Tensor:
    """What rank `owner` has in `tensor` (the others: anything of its shape), as a DTensor laid out as `like` is: each rank gets its part only."""
    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=owner)
