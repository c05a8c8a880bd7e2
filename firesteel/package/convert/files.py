"""Files of a foreign checkpoint: config.json and safetensors, whole or in shards. A pickle is named and never opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from firesteel.errors import CheckpointError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file is missing, broken or holds something else.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", mend="give the folder of a checkpoint: config.json and model.safetensors")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{path} is corrupt: {e}", mend="fetch the file again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not an object", mend="fetch the file again")
    return data


def weights_name(folder: Path) -> str:
    """The file that errors about tensors name."""
    return str(folder / (WEIGHTS if (folder / WEIGHTS).is_file() else INDEX))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, or of the shards that its index names (CPU, as stored).

    Raises:
        CheckpointError: there are only pickles or nothing, a shard is missing or corrupt, or index and shards contradict each other.
    """
    if (folder / WEIGHTS).is_file():
        return _open(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        pickles = sorted(p for p in folder.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise CheckpointError(
                f"{pickles[0]} is a pickle, and opening one runs whatever code it holds",
                mend=f"let the tool that wrote it save {WEIGHTS}; Firesteel never opens pickles",
            )
        raise CheckpointError(f"{folder / WEIGHTS} is missing", mend=f"weights must be {WEIGHTS}, or shards with {INDEX}")
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map does not name the file of each tensor", mend="fetch the file again")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(index.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX} names {shard!r}, which is no safetensors file beside it")
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder / shard} is missing, {folder / INDEX} names it", mend="fetch the file")
        tensors |= _open(folder / shard)
    if tensors.keys() != index.keys():
        odd = sorted(tensors.keys() ^ index.keys())[0]
        raise CheckpointError(f"{folder / INDEX} and its shards disagree about {odd}", mend="index and shards come from different checkpoints")
    return tensors


def _open(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"{path} is corrupt: {e}", mend="fetch the file again") from None
