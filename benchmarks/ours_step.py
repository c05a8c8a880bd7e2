"""One training step of Firesteel, as a worker (see step_worker.py): what `firesteel train` does for a batch, with its own parts.

The timed step starts where training starts: it draws anchors and packs the batch (the peer does the like inside its
forward pass), then loss, backward, clip, optimizer step.

Usage: python benchmarks/ours_step.py FOLDER [--no-compile]
FOLDER holds batch.safetensors and setting.json as step_data.py writes them.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from step_worker import MemoryMeter, serve
from torch import Tensor, nn

import firesteel
from firesteel import recipe as recipes
from firesteel.batches.packing import BlockLayout, pack
from firesteel.drafters.build import make_config
from firesteel.drafters.registry import get_spec
from firesteel.hidden.sample import HiddenSample, predictable_positions
from firesteel.hidden.stores import MemoryStore
from firesteel.kernels.memory import use_huge_pages
from firesteel.losses.weights import exponential_weights
from firesteel.stages.configure import target_facts
from firesteel.target.local import LocalTarget, load_target
from firesteel.training.data import BatchSource
from firesteel.training.loop import prepare_memory
from firesteel.training.optimizer import Optimizers
from firesteel.training.schedule import loss_weights
from firesteel.training.step import TrainJob, backward, compute_loss
from firesteel.training.tables import make_tables


class Step:
    """Drafter, optimizer and batches of Firesteel."""

    def __init__(self, folder: Path, compiled: bool) -> None:
        setting = self.setting = json.loads((folder / "setting.json").read_text())
        data = load_file(folder / "batch.safetensors")
        target = load_target(recipes.Target(model=setting["target"]))
        train = recipes.Train(
            max_steps=1000,
            anchors=setting["anchors"],
            batch_tokens=setting["tokens"],
            lr=1e-3,
            weight_decay=0.01,
            compile=compiled,
            precision=setting["precision"],
        )
        loss = recipes.Loss(**setting["loss"])
        self.sample = as_sample(data, setting, target.spec.fingerprint)
        self.anchors = data["anchors"]
        torch.manual_seed(setting["seed"])
        drafter = make_drafter(setting, target)
        block, anchored = drafter.config.block_size, drafter.config.sample_from_anchor
        self.layout = BlockLayout(block, anchored, exponential_weights(block, anchored, loss.decay), None)
        store = MemoryStore("fp32")
        store.put(self.sample)
        source = BatchSource(
            store, [self.sample.key], [len(self.sample)], self.layout, batch_tokens=setting["tokens"], anchors=setting["anchors"], seed=setting["seed"]
        )
        self.job = TrainJob(drafter, make_tables(target.head, None), source, [], train, loss, folder, target.spec.eos_ids, lambda _: None)
        self.weights = loss_weights(loss, 1.0)
        self.optimizers = Optimizers(drafter, train)
        self.done = 0
        prepare_memory(self.job)
        self.meter = MemoryMeter()

    def step(self, _: str) -> dict[str, Any]:
        """Next batch, loss, backward, clip, step: the body of the training loop."""
        started = time.perf_counter()
        batch = next(self.job.source.take(self.done, 1))
        self.optimizers.zero_grad()
        result = backward(self.job, batch, self.weights)
        nn.utils.clip_grad_norm_(self.job.drafter.parameters(), self.job.train.clip)
        self.optimizers.step()
        seconds = time.perf_counter() - started
        self.done += 1
        return {"seconds": seconds, "loss": float(result.loss.detach()), "slots": int(result.valid.sum()), **self.meter.read()}

    def save(self, path: str) -> dict[str, Any]:
        """Write the drafter's weights, for the other side to load."""
        save_file({k: v.detach().clone().contiguous() for k, v in self.job.drafter.state_dict().items()}, path)
        return {}

    def check(self, _: str) -> dict[str, Any]:
        """The loss at the anchors of the folder, without a step."""
        batch = pack([self.sample], [self.anchors], self.layout)
        inside = batch.slots >= 0
        # The peer divides by the number of slots that count, in EAGLE-3 step by step; we by the sum of their weights.
        denominator = float(inside.sum())
        if "step_decay" in self.setting:
            batch.weights = inside * self.setting["step_decay"] ** torch.arange(batch.block_size) / inside.sum(0).clamp(min=1)
            denominator = 1.0
        with torch.no_grad():
            result, _logits = compute_loss(self.job, batch, self.weights, denominator=denominator)
        return {"loss": float(result.loss.detach()), "slots": int(result.valid.sum())}


def as_sample(data: dict[str, Tensor], setting: dict[str, Any], fingerprint: str) -> HiddenSample:
    """The folder's document as a captured sample."""
    positions = predictable_positions(data["loss_mask"])
    return HiddenSample(
        key="benchmark",
        token_ids=data["token_ids"],
        loss_mask=data["loss_mask"],
        aux=data["aux"],
        last=data["last"][positions],
        last_positions=positions,
        layer_ids=tuple(setting["layer_ids"]),
        target=fingerprint,
    )


def make_drafter(setting: dict[str, Any], target: LocalTarget) -> Any:
    """The drafter that the setting describes, freshly initialised."""
    spec = target.spec
    facts = target_facts(spec)
    wanted = recipes.Drafter(
        algorithm=setting["algorithm"],
        num_layers=setting["num_layers"],
        block_size=setting["block_size"],
        markov_rank=setting["markov_rank"],
        attention="full",
        draft_vocab_size=spec.vocab_size,  # the peer's default
        eagle=recipes.Eagle(**setting.get("eagle", {})),
    )
    config = make_config(wanted, facts, tuple(setting["layer_ids"]), setting["mask_token_id"])
    return get_spec(config.algorithm).build(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    use_huge_pages()
    worker = Step(options.folder, not options.no_compile)
    about = {
        "versions": {"firesteel": firesteel.__version__, **{name: version(name) for name in ("torch", "transformers")}},
        "trainable": sum(p.numel() for p in worker.job.drafter.parameters() if p.requires_grad),
    }
    serve({"step": worker.step, "save": worker.save, "check": worker.check}, about)


if __name__ == "__main__":
    main()
