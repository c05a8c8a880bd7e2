"""Runs in the peers' environment: speculators' DFlash2 on given weights and batches, and on checkpoints.

Usage: PYTHONPATH=benchmarks:benchmarks/peers:tests/package python peer_dflash2.py OURS THEIRS FOLDER...
OURS is a checkpoint of Firesteel's; what the peer makes of it is printed. Each FOLDER holds setting.json, batch.safetensors and
weights.safetensors; `peer.safetensors` is added: hidden `[N, g, h]`, logits and targets `[N, g, V]`, ids and scores of the candidates
`[N, g, K]`, mask `[N, g]`, loss `[1]` and `grad.NAME` of each trained parameter. The first folder's model is saved as checkpoint THEIRS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import speculators.models.dflash2.core as core
import torch
from peer_open import describe
from safetensors.torch import load_file, save_file
from speculators.models.dflash2 import DFlash2DraftModel
from speculators_step import MODELS, build, collate, fixed_anchors, load_weights, train_arguments
from torch import Tensor

MODELS["dflash2"] = DFlash2DraftModel

CAUGHT = {
    "unary_logits": "logits",
    "targets": "targets",
    "training_candidate_ids": "candidates",
    "candidate_logits": "scores",
    "loss_mask": "mask",
}


def forward(folder: Path, save_to: Path | None) -> dict[str, Tensor]:
    setting, data = json.loads((folder / "setting.json").read_text()), load_file(folder / "batch.safetensors")
    args = train_arguments(setting)
    model = build(args)
    loaded = load_weights(model, folder / "weights.safetensors")
    if loaded["missing"] or loaded["unexpected"]:
        raise SystemExit(f"{folder.name}: parameters differ: {loaded}")
    if save_to is not None:
        model.save_pretrained(save_to)
    keywords, _ = type(model).get_trainer_kwargs(**vars(args))
    blocks = (len(data["anchors"]), setting["block_size"])
    found: dict[str, Tensor] = {}
    model.norm.register_forward_hook(lambda _module, _inputs, output: found.update(hidden=output))
    own = core.compute_metrics

    def listening(**named: Any) -> Any:
        found.update({ours: named[theirs] for theirs, ours in CAUGHT.items()})
        return own(**named)

    core.compute_metrics = listening
    try:
        with fixed_anchors(data["anchors"]):
            _tokens, loss, _metrics = model(**collate(data, setting), **{**keywords, "max_anchors": blocks[0]})
    finally:
        core.compute_metrics = own
    loss.backward()
    result = {name: value.detach().float().reshape(*blocks, *value.shape[2:]) for name, value in found.items()}
    result["loss"] = loss.detach().reshape(1)
    result |= {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return {name: value.clone().contiguous() for name, value in result.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    ours, theirs, *folders = (Path(p) for p in sys.argv[1:])
    sys.argv = sys.argv[:1]
    for number, case in enumerate(folders):
        save_file(forward(case, theirs if number == 0 else None), case / "peer.safetensors")
    print("PEER " + json.dumps(describe(str(ours)), default=str))
