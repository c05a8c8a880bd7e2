"""Stitch: a full copy of the target's folder with the fine-tuned tensors of an exported drafter in their native places.

Tensors that are there already are overwritten where they lie, byte for byte as long as before, so everything else in their files keeps its
bits. Where the target's files have no such head (saving a model with Transformers drops it) it goes into a file of its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firesteel.artifact import disk_error, write_atomic
from firesteel.drafters.mtp_format import TARGET_NORM, native_names, native_tensor
from firesteel.drafters.registry import get_spec
from firesteel.errors import CheckpointError, ResourceError
from firesteel.package.load import LoadedDraft, load

_INDEX, _SINGLE, _ADDED = "model.safetensors.index.json", "model.safetensors", "model-mtp.safetensors"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NORMS = ("model.norm.weight", "model.language_model.norm.weight", "language_model.model.norm.weight")
_FAMILIES_WITH_HEADS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_SPARE = 64 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file: its bytes lie at `start : end`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Stitched:
    """What was written: tensors overwritten, or added where there were none."""

    folder: Path
    replaced: int
    added: int
    bytes: int


def stitch(package: Path, target: Path, out: Path) -> Stitched:
    """Copy `target` to `out` with the tensors of `package`; `out` is there whole or not at all.

    Raises:
        CheckpointError: the drafter does not live in its target's files, belongs to another target, or a shape differs.
        ResourceError: the disk does not take the copy.
    """
    loaded = load(package)
    prefix = get_spec(loaded.config.algorithm).stitch
    if not prefix:
        raise CheckpointError(f"{package} holds a {loaded.config.algorithm} drafter, which servers load from its own folder", mend="serve it as it is")
    if out.exists():
        raise CheckpointError(f"{out} exists", mend="name a new folder")
    if not (target / "config.json").is_file():
        raise CheckpointError(f"{target} is no folder of a model: it has no config.json", mend="fetch the target into a folder and name that")
    entries = read_entries(target)
    if not entries:
        raise CheckpointError(f"{target} has neither {_INDEX} nor {_SINGLE}", mend="only safetensors files are stitched")
    state = {n: t for n, t in loaded.tensors.items() if n.startswith(prefix)}
    _check_norm(loaded, target, entries)
    there = {n: e for n, e in entries.items() if n.startswith(prefix)}
    kind = loaded.config.extra["layer"]["model_type"]
    if not there and kind not in _FAMILIES_WITH_HEADS:
        raise CheckpointError(f"no server knows an MTP head in a target of model type {kind}", mend="train another algorithm for this target")
    new = _tensors(state, there, target, entries)
    size = sum(p.stat().st_size for p in target.rglob("*") if p.is_file()) + sum(t.numel() * t.element_size() for t in new.values()) * (not there)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    parent = next(p for p in out.absolute().parents if p.exists())
    if size + _SPARE > shutil.disk_usage(parent).free:
        raise ResourceError(
            f"the copy takes {size / 1e9:.1f} GB, {shutil.disk_usage(parent).free / 1e9:.1f} GB are free at {parent}", mend="name a folder elsewhere"
        )
    try:
        shutil.copytree(target, partial)  # links (as in a hub cache) become files
        if there:
            _overwrite(partial, there, new)
        else:
            _add(partial, loaded, new, entries)
        partial.rename(out)
    except OSError as e:
        raise disk_error(e, out) from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Stitched(out, len(there), 0 if there else len(new), size)


def read_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of a model's safetensors files, by name; empty where there are no such files.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    index = folder / _INDEX
    files = [_SINGLE] * (folder / _SINGLE).is_file()
    if index.is_file():
        files = sorted(set(_json(index)["weight_map"].values()))
    found: dict[str, Entry] = {}
    for file in files:
        header, begin = _header(folder / file)
        for name, about in header.items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                found[name] = Entry(file, about["dtype"], tuple(about["shape"]), begin + first, begin + last)
    return found


def _tensors(state: Mapping[str, Tensor], there: Mapping[str, Entry], target: Path, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """What goes into the files, by the names and in the precisions that they have there."""
    usual = next((_DTYPES[e.dtype] for n, e in entries.items() if n in _NORMS and e.dtype in _DTYPES), torch.bfloat16)
    new: dict[str, Tensor] = {}
    used: set[str] = set()
    for name in there or native_names(state):
        found = native_tensor(name, state)
        if found is None:
            raise CheckpointError(
                f"{target} has {name}, which the drafter does not know", mend="quantised heads cannot be replaced; use the target that it was trained for"
            )
        entry = there.get(name)
        if entry is not None and entry.dtype not in _DTYPES:
            raise CheckpointError(f"{target}: {name} is stored as {entry.dtype}", mend=f"only {', '.join(_DTYPES)} can be replaced")
        if entry is not None and entry.shape != tuple(found[1].shape):
            raise CheckpointError(f"{name} has shape {list(found[1].shape)} in the drafter, {list(entry.shape)} in {target}", mend="use its own target")
        used.add(found[0])
        new[name] = found[1].to(usual if entry is None else _DTYPES[entry.dtype]).contiguous()
    lacking = sorted(state.keys() - used)
    if lacking:
        raise CheckpointError(f"{target} has an MTP head without {lacking[0]}", mend="use the target that the drafter was trained for")
    return new


def _check_norm(loaded: LoadedDraft, target: Path, entries: Mapping[str, Entry]) -> None:
    """The final norm travels with the drafter: another target's differs."""
    name = next((n for n in _NORMS if n in entries), None)
    if name is None or entries[name].dtype not in _DTYPES:
        return
    entry = entries[name]
    with (target / entry.file).open("rb") as f:
        f.seek(entry.start)
        raw = torch.frombuffer(bytearray(f.read(entry.end - entry.start)), dtype=_DTYPES[entry.dtype])
    ours = loaded.tensors[TARGET_NORM]
    # What the norm multiplies by; its weight may be that less one.
    if raw.shape != ours.shape or not any(torch.allclose(ours, raw.float() + offset, rtol=1e-5, atol=1e-6) for offset in (0.0, 1.0)):
        raise CheckpointError(f"{target} is not the target of {loaded.folder}: its final norm ({name}) differs", mend="give the target that it was trained for")


def _overwrite(folder: Path, there: Mapping[str, Entry], new: Mapping[str, Tensor]) -> None:
    for name, entry in there.items():
        data = _bytes(new[name])
        assert len(data) == entry.end - entry.start, name
        with (folder / entry.file).open("r+b") as f:
            f.seek(entry.start)
            f.write(data)


def _add(folder: Path, loaded: LoadedDraft, new: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> None:
    """A head where there was none: a file of its own, listed in the index, and its layer counted in config.json."""
    kind = loaded.config.extra["layer"]["model_type"]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {dtype: name for name, dtype in _DTYPES.items()}
    at = 0
    for name, tensor in new.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / _ADDED).open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in new.values():
            f.write(_bytes(tensor))
    index: dict[str, Any] = _json(folder / _INDEX) if (folder / _INDEX).is_file() else {"weight_map": {n: e.file for n, e in entries.items()}}
    index["weight_map"] |= dict.fromkeys(new, _ADDED)
    whole = sum(e.end - e.start for e in entries.values()) + at
    index["metadata"] = {**index.get("metadata", {}), "total_size": whole}
    write_atomic(folder / _INDEX, json.dumps(index, indent=2) + "\n")
    config = _json(folder / "config.json")
    field = "num_nextn_predict_layers" if kind == "qwen3_next" else "mtp_num_hidden_layers"
    config.get("text_config", config)[field] = 1
    write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors begin."""
    try:
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            return json.loads(f.read(length)), 8 + length
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}", mend="fetch the target again") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{path} is corrupt: {e}", mend="fetch the target again") from None


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
