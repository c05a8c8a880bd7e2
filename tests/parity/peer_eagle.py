"""Runs in the peers' environment: forward and backward of speculators' EAGLE-3 and P-EAGLE on given weights and one document.

Usage: python peer_eagle.py FOLDER...
Each folder holds setting.json, data.safetensors and weights.safetensors; `peer.safetensors` is added: hidden and logits of the elements
`[E, h]`, `[E, V]` in the order of `elements` (chain number, depth), loss `[1]`, and `grad.NAME` of each trained parameter. The model is saved as
checkpoint `theirs` in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import speculators.models.eagle3.core as eagle_core
import speculators.models.peagle.core as peagle_core
import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        save_file(forward(folder), folder / "peer.safetensors")


def build(setting: dict[str, Any], data: dict[str, Tensor]) -> Any:
    layers = {"llama": LlamaConfig, "qwen3": Qwen3Config}[setting["layer_style"]](**setting["layers"])
    layers._attn_implementation = "eager"
    frame = SpeculatorsConfig(
        algorithm=setting["algorithm"],
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=setting["steps"])],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    peagle = setting["algorithm"] == "peagle"
    config_class, model_class = (PEagleSpeculatorConfig, PEagleDraftModel) if peagle else (Eagle3SpeculatorConfig, Eagle3DraftModel)
    more = {"mask_token_id": setting["mask_token_id"], "embed_requires_grad": False} if peagle else {}
    config = config_class(
        transformer_layer_config=layers,
        draft_vocab_size=setting["draft_vocab_size"],
        eagle_aux_hidden_state_layer_ids=setting["layer_ids"],
        speculators_config=frame,
        **setting["flags"],
        **more,
    )
    model = model_class(config).float()
    if setting["draft_vocab_size"] != layers.vocab_size:
        model.load_vocab_mappings(data["t2d"], data["d2t"])
    shared = {
        "embed_tokens.weight": data["embed"],
        "lm_head.weight": data["head"],
        "verifier_lm_head.weight": data["head"],
        "verifier_norm.weight": data["norm"],
    }
    model.load_state_dict(shared, strict=False)
    return model.train()


def forward(folder: Path) -> dict[str, Tensor]:
    setting, data = json.loads((folder / "setting.json").read_text()), load_file(folder / "data.safetensors")
    model, weights = build(setting, data), load_file(folder / "weights.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if unexpected or trained & set(missing):
        raise SystemExit(f"{folder.name}: parameters differ: {unexpected}, {sorted(trained & set(missing))}")
    model.save_pretrained(folder / "theirs")
    length = len(data["token_ids"])
    batch = shift_batch(
        {
            "hidden_states": data["aux"],
            "input_ids": data["token_ids"],
            "verifier_last_hidden_states": data["last"],
            "loss_mask": data["loss_mask"],
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    batch = {name: value[None] for name, value in batch.items() if name != "lengths"}
    batch["document_ids"] = torch.zeros(1, length - 1, dtype=torch.long)
    states: list[Tensor] = []
    logits: list[Tensor] = []
    model.norm.register_forward_hook(lambda _module, _inputs, output: states.append(output))
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output))
    loss_config = resolve_loss_config(json.dumps(setting["loss"]), "eager")
    elements = data["elements"]  # [E, 2]: chain, depth
    if setting["algorithm"] == "peagle":
        peagle_core.generate_cod_sample_indices = lambda **_: (elements[:, 0], elements[:, 1])
        _, loss, _ = model(**batch, loss_config=loss_config, num_depths=setting["steps"])
        hidden, scores = states[0][0], logits[0][0]
    else:
        # The peer's dense masks are bfloat16 by default, and its keys float32.
        own = eagle_core.create_float_mask
        model._create_mask_fn = lambda *given, **named: own(*given, dtype=torch.float32, **named)
        _, loss, _ = model(**batch, loss_config=loss_config, ttt_steps=setting["steps"], ttt_step_loss_decay=setting["decay"])
        hidden, scores = (torch.stack([x[0] for x in found])[elements[:, 1], elements[:, 0]] for found in (states, logits))
    loss.backward()
    result = {"hidden": hidden.detach(), "logits": scores.detach(), "loss": loss.detach().reshape(1)}
    result |= {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return {name: value.clone().contiguous() for name, value in result.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
