"""One training step of speculators 0.9.0, as a worker (see step_worker.py). Runs in the peers' environment.

Its own code throughout: configuration from its command line, model, collation, loss, optimizer, clipping as its trainer
does it. What a machine without CUDA leaves no choice about: SDPA attention (its Flex attention has no backward on CPU) and
its eager losses (its fused ones need a GPU). One thing is replaced, and only in `check`: the random choice of anchors.

Usage: PYTHONPATH=benchmarks python benchmarks/peers/speculators_step.py FOLDER [--compile]
FOLDER holds batch.safetensors and setting.json as step_data.py writes them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import speculators.models.dflash.core as dflash_core
import torch
from safetensors.torch import load_file
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash2 import DFlash2DraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import build_draft_model, parse_vocab_mappings
from speculators.train.config import TrainConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from step_worker import MemoryMeter, serve
from torch import Tensor

MODELS = {"dspark": DSparkDraftModel, "dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel, "eagle3": Eagle3DraftModel}


def train_arguments(setting: dict[str, Any]) -> argparse.Namespace:
    """The setting as the peer's own trainer understands it; everything that is not named keeps the peer's default.

    `flags` of the setting are more of the peer's options, and win; one without values is left out.
    """
    given = {
        "--speculator-type": [setting["algorithm"]],
        "--verifier-name-or-path": [setting["target"]],
        "--total-seq-len": [setting["tokens"]],
        "--num-layers": [setting["num_layers"]],
        "--target-layer-ids": setting["layer_ids"],
        "--optimizer": ["adamw"],
        "--hidden-states-dtype": ["float32"],
        "--draft-attn-impl": ["sdpa"],
        "--loss-implementation": ["eager"],
    }
    if setting["algorithm"] == "eagle3":
        given |= {
            "--ttt-steps": [setting["block_size"]],
            "--ttt-step-loss-decay": [setting["step_decay"]],
            "--loss-fn": ["kl_div"],
        }
    else:
        given |= {
            "--max-anchors": [setting["anchors"]],
            "--block-size": [setting["block_size"]],
            "--full-attention-indices": list(range(setting["num_layers"])),
            "--mask-token-id": [setting["mask_token_id"]],
            "--loss-fn": [json.dumps({k: v for k, v in setting["loss"].items() if k in ("ce", "tv")})],
            "--per-position-loss-weight": ["fixed-exp-decay"],
        }
    if setting["algorithm"] == "dspark":
        given |= {"--markov-rank": [setting["markov_rank"]], "--confidence-head-alpha": [setting["loss"]["confidence"]]}
    given |= setting.get("flags", {})
    argv = [str(word) for name, values in given.items() if values for word in (name, *values)]
    return argparse.Namespace(**TrainConfig.resolve(argv).flatten())


def build(args: argparse.Namespace) -> SpeculatorModel:
    """The draft model as the peer's trainer builds it."""
    d2t, t2d, draft_vocab_size = parse_vocab_mappings(args)
    model = build_draft_model(args, MODELS[args.speculator_type], t2d, d2t, draft_vocab_size)
    return model.train()


class Step:
    """Model, optimizer and batch of the peer."""

    def __init__(self, folder: Path, compiled: bool) -> None:
        setting = json.loads((folder / "setting.json").read_text())
        data = load_file(folder / "batch.safetensors")
        args = train_arguments(setting)
        torch.manual_seed(setting["seed"])
        self.model = build(args)
        model_class = type(self.model)
        self.keywords, _ = model_class.get_trainer_kwargs(**vars(args))
        self.optimizers = build_optimizers(self.model, args)
        self.batch = collate(data, setting)
        self.anchors = data["anchors"]
        forward = torch.compile(model_class.forward) if compiled else model_class.forward
        self.forward = forward.__get__(self.model)
        self.meter = MemoryMeter()

    def step(self, _: str) -> dict[str, Any]:
        """Forward, backward, clip, optimizer step, in the order of the peer's trainer."""
        started = time.perf_counter()
        _tokens, loss, metrics = self.forward(**self.batch, **self.keywords)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        seconds = time.perf_counter() - started
        slots = float(metrics.get("accept_rate_total", torch.tensor(float("nan"))))
        return {"seconds": seconds, "loss": float(loss.detach()), "slots": slots, **self.meter.read()}

    def load(self, path: str) -> dict[str, Any]:
        """Take the weights of a file; whatever it does not hold stays (the target's frozen tables)."""
        return load_weights(self.model, Path(path))

    def check(self, _: str) -> dict[str, Any]:
        """The loss at the anchors of the folder, without a step."""
        more = {} if isinstance(self.model, Eagle3DraftModel) else {"max_anchors": len(self.anchors)}
        with fixed_anchors(self.anchors), torch.no_grad():
            _tokens, loss, metrics = self.model(**self.batch, **{**self.keywords, **more})
        terms = {k: float(metrics[f"{k}_sum"]) for k in ("ce_loss", "tv_loss", "confidence_loss") if f"{k}_sum" in metrics}
        return {"loss": float(loss), **terms}


def load_weights(model: SpeculatorModel, path: Path) -> dict[str, Any]:
    """Load a file of weights; returns names that the model does not know, and trainable ones that the file lacks."""
    missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {"unexpected": list(unexpected), "missing": sorted(trained & set(missing))}


@contextmanager
def fixed_anchors(anchors: Tensor) -> Iterator[None]:
    """While open, the peer takes these anchors instead of drawing its own."""
    own = dflash_core.select_anchors
    dflash_core.select_anchors = lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    try:
        yield
    finally:
        dflash_core.select_anchors = own


def collate(data: dict[str, Tensor], setting: dict[str, Any]) -> dict[str, Any]:
    """The documents (one, unless `lengths` says otherwise) through the peer's own collation."""
    lengths = data.get("lengths", torch.tensor([len(data["token_ids"])])).tolist()
    if setting["algorithm"] == "eagle3":
        # It counts a step by the token whose state predicts; the last one predicts nothing here.
        data = {**data, "loss_mask": data["loss_mask"].clone()}
        data["loss_mask"][torch.tensor(lengths).cumsum(0) - 1] = False
    parts = {name: data[name].split(lengths) for name in ("token_ids", "loss_mask", "aux", "last")}
    samples = [
        {
            "hidden_states": parts["aux"][i].flatten(1),
            "input_ids": parts["token_ids"][i],
            "verifier_last_hidden_states": parts["last"][i],
            "loss_mask": parts["loss_mask"][i],
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
        for i, length in enumerate(lengths)
    ]
    own = CollateFn(
        setting["tokens"],
        data["last"].shape[1],
        num_target_layers=len(setting["layer_ids"]),
        dtype=torch.float32,
        preprocess=shift_batch if setting["algorithm"] == "eagle3" else None,
    )
    return own(samples)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    sys.argv = sys.argv[:1]
    worker = Step(options.folder, options.compile)
    about = {
        "versions": {name: version(name) for name in ("speculators", "torch", "transformers")},
        "trainable": sum(p.numel() for p in worker.model.parameters() if p.requires_grad),
    }
    serve({"step": worker.step, "load": worker.load, "check": worker.check}, about)


if __name__ == "__main__":
    main()
