"""Export: a trained drafter as a folder that vLLM opens, with its contract beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from firesteel.artifact import disk_error, hash_file, write_atomic
from firesteel.drafters.config import DraftConfig
from firesteel.errors import CheckpointError, ResourceError
from firesteel.package.config_json import dtype_name, to_speculators
from firesteel.package.contract import Contract, check_contract
from firesteel.package.keys import D2T, HEAD, T2D, Key, check_tensors, drafter_keys, vocab_keys

CONFIG, WEIGHTS, CONTRACT = "config.json", "model.safetensors", "firesteel.json"
CONTRACT_VERSION = 1


@dataclass(frozen=True)
class Exported:
    """What was written: `parameters` counts the trained ones (neither LM head rows nor tables)."""

    folder: Path
    parameters: int
    file_bytes: int
    weights_sha256: str


def export(
    folder: Path,
    state_dict: Mapping[str, Tensor],
    config: DraftConfig,
    contract: Contract,
    *,
    target_ids: Tensor | None,
    head_rows: Tensor | None,
    dtype: torch.dtype,
) -> Exported:
    """Write config.json, model.safetensors and firesteel.json into `folder`.

    Args:
        state_dict: the drafter's parameters by checkpoint key.
        target_ids: `[V_draft]` target id of each draft id, ascending, or None for a full vocabulary.
        head_rows: `[V_draft, H]` the target's LM head at `target_ids`, or None for a full vocabulary.
        dtype: precision of the weights; the confidence head stays float32.

    Raises:
        CheckpointError: weights, configuration, contract and vocabulary contradict each other, or a weight is not finite.
        ResourceError: the disk does not take the files.
    """
    check_contract(contract, config)
    dtype_name(dtype)
    keys = drafter_keys(config)
    check_tensors(state_dict, keys, what="the drafter")
    tensors = {name: _cast(name, state_dict[name], key, dtype) for name, key in keys.items()}
    parameters = sum(t.numel() for t in tensors.values())
    tensors |= _vocabulary(config, target_ids, head_rows, dtype)

    weights = folder / WEIGHTS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Without its contract an overwritten folder must not pass for the old one.
        (folder / CONTRACT).unlink(missing_ok=True)
        save_file(tensors, weights, metadata={"format": "pt"})
    except OSError as e:
        raise disk_error(e, weights) from e
    except SafetensorError as e:
        raise ResourceError(f"cannot write {weights}: {e}", mend="free some space or set runs_dir=ANOTHER_DISK") from e
    digest = hash_file(weights)
    write_atomic(folder / CONFIG, json.dumps(to_speculators(config, contract, dtype), indent=2) + "\n")
    promise = {
        "format_version": CONTRACT_VERSION,
        "contract": contract.model_dump(mode="json"),
        "draft": config.to_dict(),
        "files": {WEIGHTS: digest},
    }
    write_atomic(folder / CONTRACT, json.dumps(promise, indent=2) + "\n")
    return Exported(folder, parameters, weights.stat().st_size, digest)


def vocab_tables(target_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Target id of each draft id `[V_draft]` -> offsets `d2t [V_draft]` int64 (target id - draft id) and marks `t2d [V]` bool.

    Raises:
        CheckpointError: an id is repeated or outside the vocabulary.
    """
    ids = target_ids.detach().cpu().long()
    if ids.ndim != 1 or ids.numel() == 0 or ids.unique().numel() != ids.numel():
        raise CheckpointError(f"target ids of shape {list(ids.shape)} are not a row without repetition")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise CheckpointError(f"target ids go from {int(ids.min())} to {int(ids.max())}, the target's vocabulary ends at {vocab_size - 1}")
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[ids] = True
    return ids - torch.arange(ids.shape[0]), marks


def _vocabulary(config: DraftConfig, target_ids: Tensor | None, head_rows: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    keys = vocab_keys(config)
    if target_ids is None or head_rows is None or not keys:
        if keys or target_ids is not None or head_rows is not None:
            given = [name for name, value in (("target_ids", target_ids), ("head_rows", head_rows)) if value is not None]
            raise CheckpointError(
                f"draft_vocab_size={config.draft_vocab_size} of vocab_size={config.vocab_size} "
                f"was exported with {' and '.join(given) or 'neither target_ids nor head_rows'}",
                mend="a reduced vocabulary needs both, a full one neither",
            )
        return {}
    d2t, t2d = vocab_tables(target_ids, config.vocab_size)
    if bool((target_ids[1:] <= target_ids[:-1]).any()):
        # speculators cuts the target's head by t2d, that is in ascending order.
        raise CheckpointError("target_ids are not ascending: other readers would pair the LM head's rows with other tokens")
    tensors = {HEAD: head_rows, D2T: d2t, T2D: t2d}
    check_tensors(tensors, keys, what="the draft vocabulary")
    return tensors | {HEAD: _cast(HEAD, head_rows, keys[HEAD], dtype)}


def _cast(name: str, tensor: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    """On the CPU, contiguous, in the checkpoint's precision. A clone: the file must not depend on what else shares the memory."""
    cast = tensor.detach().to(device="cpu", dtype=key.dtype(dtype)).contiguous().clone()
    if not bool(torch.isfinite(cast).all()):
        raise CheckpointError(f"{name} is not finite in {cast.dtype}", mend="train again from the last good checkpoint, or export in a wider precision")
    return cast
