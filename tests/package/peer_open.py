"""Opens checkpoints with the speculators package and prints what it understood, one JSON line each. Runs in the peers' own environment.

Usage: python peer_open.py FOLDER...
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig

# speculators keeps these in the model, but takes them from the target.
SHARED = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


def describe(folder: str) -> dict[str, object]:
    config = SpeculatorModelConfig.from_pretrained(folder)
    file = load_file(f"{folder}/model.safetensors")
    if config.speculators_model_type in ("eagle3", "peagle"):  # these do not tell what they loaded
        model = SpeculatorModel.from_pretrained(folder)
        unexpected = sorted(file.keys() - model.state_dict().keys())
        missing = sorted(model.state_dict().keys() - file.keys() - SHARED)
        info = {"missing_keys": missing, "unexpected_keys": unexpected}
    else:
        model, info = SpeculatorModel.from_pretrained(folder, output_loading_info=True)
    state = model.state_dict()
    return {
        "class": type(model).__name__,
        "loading": {k: sorted(map(str, v)) for k, v in info.items() if k.endswith("keys") or k == "error_msgs"},
        "lacking": sorted(state.keys() - file.keys() - SHARED),
        "different": sorted(k for k, v in file.items() if k not in state or not torch.equal(state[k].float(), v.to(state[k].dtype).float())),
        "sliding": model.sliding_window_indices,
        "window": model.sliding_window if model.sliding_window_indices else None,
        "non_causal": getattr(model, "sliding_window_non_causal", None),
        "rope": model.rotary_emb.inv_freq.tolist(),
        "config": json.loads(config.to_json_string()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        print("PEER " + json.dumps(describe(path), default=str), flush=True)
