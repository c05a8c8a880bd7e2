"""Runs in the peers' environment: forward and backward of speculators' MTP drafter on a native head and one document.

Usage: python peer_mtp.py FOLDER...
Each folder is a target's as far as the peer's converter looks: config.json and model.safetensors with `mtp.*`; beside them setting.json
and data.safetensors. `peer.safetensors` is added: hidden and logits of the steps `[K, P, h]`, `[K, P, V]`, loss `[1]`, and `grad.NAME`
of each trained parameter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.convert.mtp import MTPConverter
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.mtp.core import compute_step_weights
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import AutoConfig


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        save_file(forward(folder), folder / "peer.safetensors")


def forward(folder: Path) -> dict[str, Tensor]:
    setting, data = json.loads((folder / "setting.json").read_text()), load_file(folder / "data.safetensors")
    layers = AutoConfig.from_pretrained(folder)
    layers._attn_implementation = layers._experts_implementation = "eager"
    frame = SpeculatorsConfig(
        algorithm="mtp",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=setting["steps"])],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3_5ForCausalLM"]),
    )
    model = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layers, speculators_config=frame)).float().train()
    weights = MTPConverter().convert_to_state_dict(folder) | {"embed_tokens.weight": data["embed"], "lm_head.weight": data["head"]}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if unexpected or trained & set(missing):
        raise SystemExit(f"{folder.name}: parameters differ: {unexpected}, {sorted(trained & set(missing))}")
    hidden: list[Tensor] = []
    model.mtp_layers[0].register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    logits, loss, _ = model(
        input_ids=data["token_ids"][None],
        hidden_states=data["states"][None],
        loss_mask=torch.ones_like(data["token_ids"])[None],
        step_weights=compute_step_weights(setting["beta"], setting["steps"]),
    )
    loss.backward()
    result = {"hidden": torch.cat(hidden), "logits": torch.cat(logits), "loss": loss.reshape(1)}
    result |= {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return {name: value.detach().clone().contiguous() for name, value in result.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
