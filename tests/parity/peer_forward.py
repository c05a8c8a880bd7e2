"""Runs in the peers' environment: forward and backward of speculators' drafters on given weights and batches.

Usage: PYTHONPATH=benchmarks:benchmarks/peers python peer_forward.py FOLDER...
Each folder holds setting.json, batch.safetensors and weights.safetensors; `peer.safetensors` is added: hidden `[N, g, h]`,
logits `[N, g, V]`, targets `[N, g, V]`, mask `[N, g]`, confidence `[N, g]` (if any), loss `[1]`, and `grad.NAME` of each
trained parameter. The model is saved as checkpoint `theirs` in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import speculators.models.dflash.core as dflash_core
import speculators.models.dspark.core as dspark_core
import torch
from safetensors.torch import load_file, save_file
from speculators_step import build, collate, fixed_anchors, load_weights, train_arguments
from torch import Tensor


def main() -> None:
    folders = [Path(p) for p in sys.argv[1:]]
    sys.argv = sys.argv[:1]
    for folder in folders:
        save_file(forward(folder), folder / "peer.safetensors")


def forward(folder: Path) -> dict[str, Tensor]:
    setting, data = json.loads((folder / "setting.json").read_text()), load_file(folder / "batch.safetensors")
    args = train_arguments(setting)
    model = build(args)
    loaded = load_weights(model, folder / "weights.safetensors")
    if loaded["missing"] or loaded["unexpected"]:
        raise SystemExit(f"{folder.name}: parameters differ: {loaded}")
    model.save_pretrained(folder / "theirs")
    keywords, _ = type(model).get_trainer_kwargs(**vars(args))
    blocks = (len(data["anchors"]), setting["block_size"])
    found: dict[str, Tensor] = {}
    model.norm.register_forward_hook(lambda _module, _inputs, output: found.update(hidden=output))
    # Both cores hand logits and targets to a function of this name; it is the only place where they are all there.
    core = dspark_core if setting["algorithm"] == "dspark" else dflash_core
    own = core.compute_metrics

    def listening(logits: Tensor, targets: Tensor, *rest: Any, **named: Any) -> Any:
        found.update(logits=logits, targets=targets)
        if setting["algorithm"] == "dspark":
            found["confidence"], found["mask"] = rest[0], rest[1]
        else:
            found["mask"] = rest[0]
        return own(logits, targets, *rest, **named)

    core.compute_metrics = listening
    try:
        with fixed_anchors(data["anchors"]):
            _tokens, loss, _metrics = model(**collate(data, setting), **{**keywords, "max_anchors": blocks[0]})
    finally:
        core.compute_metrics = own
    loss.backward()
    result = {name: value.detach().float().reshape(*blocks, *value.shape[2:]) for name, value in found.items() if value is not None}
    result["loss"] = loss.detach().reshape(1)
    result |= {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return {name: value.clone().contiguous() for name, value in result.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
