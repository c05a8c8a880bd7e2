"""Folders of targets whose weights are packed, made from the numbers of a float model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from firesteel import recipe as recipes

GROUP = 16


def folder_with(path: Path, model: Any, tensors: dict[str, Tensor], gone: list[str], quantization: dict[str, Any]) -> recipes.Target:
    """The model's folder with some tensors replaced, and the config that says how they are packed."""
    model.save_pretrained(path)
    file = path / "model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if n not in gone}
    save_file({n: t.contiguous() for n, t in (kept | tensors).items()}, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return recipes.Target(model=str(path), device="cpu")


@torch.no_grad()
def int4_folder(path: Path, plain: Any) -> recipes.Target:
    """The linear layers of `plain` in four bits, packed as compressed-tensors does; `plain` takes the numbers that they stand for."""
    tensors: dict[str, Tensor] = {}
    gone = []
    for name, weight in plain.model.layers.named_parameters():
        if not name.endswith("_proj.weight"):
            continue
        key = f"model.layers.{name}"
        rows, columns = weight.shape
        groups = weight.view(rows, -1, GROUP)
        scale = groups.abs().amax(-1) / 7
        codes = (groups / scale[..., None]).round().clamp(-8, 7).view(rows, columns).long()
        weight.copy_((codes.view(rows, -1, GROUP) * scale[..., None]).view(rows, columns))
        # Eight codes of four bits in an int32, the first in the lowest bits, each 8 above its value.
        nibbles = (codes + 8).view(rows, -1, 8) << (4 * torch.arange(8))
        tensors[f"{key}_packed"] = nibbles.sum(-1).to(torch.uint32).view(torch.int32)
        tensors[f"{key}_scale"] = scale
        tensors[f"{key}_shape"] = torch.tensor([rows, columns])
        gone.append(key)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return folder_with(path, plain, tensors, gone, quantization)
