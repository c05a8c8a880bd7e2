"""Conversion: read any known layout, check it against the target where that is given, write another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from firesteel.artifact import disk_error, write_atomic
from firesteel.errors import CheckpointError
from firesteel.package.contract import Contract, make_contract
from firesteel.package.convert import deepspec, dflash, eagle3, mtp, speculators
from firesteel.package.convert.fields import Fields
from firesteel.package.convert.files import CONFIG, WEIGHTS, read_json
from firesteel.package.convert.foreign import Foreign, check_layer_ids, share
from firesteel.package.convert.registry import detect
from firesteel.target.spec import TargetSpec

OUT = ("speculators", "deepspec", "sglang")


@dataclass(frozen=True)
class TargetTables:
    """A loaded target: its facts, embedding and LM head `[V, H]`, and what its final norm multiplies by `[H]` (computed when it is needed)."""

    spec: TargetSpec
    embed: Tensor
    head: Tensor
    norm: Callable[[], Tensor] | None = None


def read(folder: Path, given: Mapping[str, Any], target: TargetTables | None = None) -> Foreign:
    """Read a checkpoint of any known layout.

    Args:
        given: overrides (`fields.read_overrides`).
        target: its target, if known; the drafter is then checked against it, and copies of its tables are left out.

    Raises:
        CheckpointError: the checkpoint does not say what it must, contradicts itself, or belongs to another target.
    """
    path = folder / CONFIG
    data = read_json(path)
    layout = detect(data, str(path))
    given = dict(given)
    if target is not None and layout.name == eagle3.NAME and "num_target_layers" not in data:
        given.setdefault("target_layers", target.spec.num_layers)
    found = layout.read(folder, Fields(data, str(path), given))
    if target is not None:
        check_spec(found, target.spec)
    if found.layout == mtp.NAME:
        found = mtp.complete(found, None if target is None else target.norm)
    if target is None:
        return found
    return replace(share(found, target.embed, target.head), target_layers=target.spec.num_layers)


def check_spec(found: Foreign, spec: TargetSpec) -> None:
    """Refuse a drafter of another target; sizes decide, and the contract's fingerprint where there is one.

    Raises:
        CheckpointError: names what differs, with both values.
    """
    c, contract = found.config, found.contract
    pairs: list[tuple[str, int | str | None, int | str]] = [
        ("vocabulary", c.vocab_size, spec.vocab_size),
        ("hidden size", c.target_hidden_size, spec.hidden_size),
        ("number of layers", found.target_layers, spec.num_layers),
        ("fingerprint", None if contract is None else contract.target_fingerprint, spec.fingerprint),
    ]
    for what, trained, have in pairs:
        if trained is not None and trained != have:
            raise CheckpointError(
                f"the drafter in {found.folder} was trained for a target whose {what} is {trained}, that of {spec.name} is {have}",
                mend="give the target that the drafter was trained for",
            )
    check_layer_ids(c.layer_ids, spec.num_layers, f"{found.folder}: layer_ids")


def write(found: Foreign, folder: Path, to: str, target: TargetTables | None = None) -> tuple[str, ...]:
    """Write a checkpoint as `speculators`, `deepspec` or `sglang`; returns what the user should know.

    Raises:
        CheckpointError: the folder is not empty, or the layout has no place for something of the drafter.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not an empty folder", mend="give another, or remove it")
    if to == "speculators":
        contract, notes = _contract(found, target)
        speculators.write(found, folder, contract, None if target is None else target.spec.architecture)
        return notes
    if to not in OUT:
        raise CheckpointError(f"there is no layout {to!r} to write", mend=f"--to {', '.join(OUT)}")
    writers = {"deepspec": deepspec.write, "sglang": eagle3.write if found.config.algorithm == "eagle3" else dflash.write}
    if found.config.algorithm not in ("dspark", "dflash", "eagle3"):
        raise CheckpointError(f"the {to} layout has no {found.config.algorithm}", mend="use --to speculators")
    embed, head = (None, None) if target is None else (target.embed, target.head)
    written = writers[to](found, found.target_layers, embed, head)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Clones: tied tables share their memory, which the file format does not allow.
        save_file({name: t.clone().contiguous() for name, t in written.tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    except OSError as e:
        raise disk_error(e, folder / WEIGHTS) from e
    write_atomic(folder / CONFIG, json.dumps(written.data, indent=2) + "\n")
    return written.notes


def _contract(found: Foreign, target: TargetTables | None) -> tuple[Contract | None, tuple[str, ...]]:
    """The checkpoint's own contract, or a new one if the target is known and its tables are shared."""
    if found.contract is not None:
        return found.contract, ()
    own = [name for name, table in (("embedding", found.embed), ("LM head", None if found.config.reduced_vocab else found.head_rows)) if table is not None]
    if target is None or own:
        why = f"the drafter has its own {' and '.join(own)}" if target else "without --target nobody knows which weights it belongs to"
        return None, (f"no firesteel.json: {why}",)
    contract = make_contract(found.config, target.spec, template_options={}, temperatures=(), promise=None, speculative_tokens=found.config.num_drafts)
    return contract, ()
