"""Load: open a checkpoint and refuse whatever does not say what it must."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from firesteel.artifact import hash_file
from firesteel.drafters.config import SLIDING, DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.errors import CheckpointError, FiresteelError
from firesteel.package.config_json import Described, from_speculators
from firesteel.package.contract import Contract, check_contract, read_contract
from firesteel.package.export import CONFIG, CONTRACT, CONTRACT_VERSION, WEIGHTS, vocab_tables
from firesteel.package.keys import D2T, EMBED, HEAD, T2D, Key, check_tensors, drafter_keys, vocab_keys

_AGAIN = "export the drafter again, or fetch the file again"


@dataclass(frozen=True)
class LoadedDraft:
    """An opened checkpoint.

    Attributes:
        tensors: the drafter's state dict, as stored (CPU).
        dtype: precision of the weights.
        target_ids: `[V_draft]` int64 target id of each draft id, or None for a full vocabulary.
        head_rows: `[V_draft, H]` the drafter's LM head, or None where the target's is shared.
        embed: `[V, H]` an embedding of its own (foreign checkpoints), or None where the target's is shared.
        contract: train/serve contract; None for a foreign checkpoint, which has only config.json.
        verifier: name of the target in config.json, or None.
        speculative_tokens: tokens to draft per round.
    """

    folder: Path
    config: DraftConfig
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    target_ids: Tensor | None
    head_rows: Tensor | None
    embed: Tensor | None
    contract: Contract | None
    verifier: str | None
    speculative_tokens: int


def describe(folder: Path) -> tuple[DraftConfig, Contract | None]:
    """What a checkpoint says of itself; its weights are not read.

    Raises:
        CheckpointError: as `load`, for the files that are read.
    """
    described = from_speculators(_read_json(folder / CONFIG), where=str(folder / CONFIG))
    if not (folder / CONTRACT).is_file():
        return described.config, None
    contract, config = _read_contract(folder, described)
    return config, contract


def load(folder: Path, *, said: Mapping[str, Any] | None = None) -> LoadedDraft:
    """Open a checkpoint written by `export`, or a foreign one in the speculators format.

    Args:
        said: top-level fields of config.json that the file lacks.

    Raises:
        CheckpointError: a file is missing or corrupt, a tensor or field is missing, unknown or wrong, or two of them contradict each other.
    """
    described = from_speculators(_read_json(folder / CONFIG) | dict(said or {}), where=str(folder / CONFIG))
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise CheckpointError(f"{weights} is missing", mend="weights must be one safetensors file; merge shards, convert pickles")
    contract, config = None, described.config
    if (folder / CONTRACT).is_file():
        contract, config = _read_contract(folder, described)
        _check_bytes(folder)
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"{weights} is corrupt: {e}", mend=_AGAIN) from None

    keys = drafter_keys(config) | vocab_keys(config)
    if contract is None:
        # Others may store tables of their own where Firesteel shares the target's; vLLM then uses these.
        own = {HEAD: Key((config.draft_vocab_size, config.hidden_size)), EMBED: Key((config.vocab_size, config.hidden_size))}
        keys |= {name: key for name, key in own.items() if name in tensors}
    check_tensors(tensors, keys, what=str(weights))
    dtype = described.dtype or next(tensors[name].dtype for name, key in keys.items() if key.kind == "weight")
    _check_values(tensors, keys, dtype, foreign=contract is None, where=str(weights))
    target_ids = _target_ids(tensors, config, str(weights)) if config.reduced_vocab else None
    return LoadedDraft(
        folder=folder,
        config=config,
        tensors={name: tensors[name] for name in drafter_keys(config)},
        dtype=dtype,
        target_ids=target_ids,
        head_rows=tensors.get(HEAD),
        embed=tensors.get(EMBED),
        contract=contract,
        verifier=described.verifier,
        speculative_tokens=described.speculative_tokens,
    )


def check_target(loaded: LoadedDraft, spec_fingerprint: str, hidden_size: int, vocab_size: int, *, target_name: str = "this target") -> None:
    """Refuse a drafter that was trained for another target; sizes alone decide where there is no contract.

    Raises:
        CheckpointError: names both targets and what differs.
    """
    contract = loaded.contract
    owner = (contract.target_name if contract else loaded.verifier) or "an unnamed target"
    pairs: list[tuple[str, int | str, int | str]] = [
        ("hidden size", loaded.config.target_hidden_size, hidden_size),
        ("vocabulary", loaded.config.vocab_size, vocab_size),
    ]
    if contract is not None:
        pairs.append(("fingerprint", contract.target_fingerprint, spec_fingerprint))
    for what, trained, found in pairs:
        if trained != found:
            raise CheckpointError(
                f"the drafter in {loaded.folder} was trained for {owner} ({what} {trained}), not for {target_name} ({what} {found})",
                mend="give the target that the drafter was trained for, or train one for this target",
            )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", mend="give the folder of an exported drafter")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{path} is corrupt: {e}", mend=_AGAIN) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not an object", mend=_AGAIN)
    return data


def _read_contract(folder: Path, described: Described) -> tuple[Contract, DraftConfig]:
    """firesteel.json, checked against config.json."""
    path = folder / CONTRACT
    data = _read_json(path)
    if data.get("format_version") != CONTRACT_VERSION:
        raise CheckpointError(f"{path} has format_version {data.get('format_version')!r}, this Firesteel reads {CONTRACT_VERSION}")
    parts = {name: data.get(name) for name in ("contract", "draft", "files")}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise CheckpointError(f"{path}: {name} is {'missing' if part is None else type(part).__name__}, not an object", mend=_AGAIN)
    contract = read_contract(data["contract"], where=str(path))
    config = _read_draft(data["draft"], str(path))
    _compare(config, described.config, folder)
    check_contract(contract, config)
    if contract.speculative_tokens != described.speculative_tokens:
        raise CheckpointError(f"speculative_tokens is {contract.speculative_tokens} in {path}, {described.speculative_tokens} in {folder / CONFIG}")
    return contract, config


def _check_bytes(folder: Path) -> None:
    """The weights are those that the contract was written for."""
    path = folder / CONTRACT
    wanted, found = _read_json(path)["files"].get(WEIGHTS), hash_file(folder / WEIGHTS)
    if wanted != found:
        raise CheckpointError(f"{folder / WEIGHTS} is corrupt: its sha256 is {found[:12]}, {path} says {str(wanted)[:12]}", mend=_AGAIN)


def _read_draft(data: dict[str, Any], where: str) -> DraftConfig:
    known = {f.name for f in fields(DraftConfig)}
    if known != data.keys():
        lacks, extra = sorted(known - data.keys()), sorted(data.keys() - known)
        raise CheckpointError(f"{where}: draft lacks {lacks} and holds unknown {extra}", mend="the checkpoint was written by another version of Firesteel")
    try:
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return DraftConfig(**values)
    except (TypeError, FiresteelError) as e:
        raise CheckpointError(f"{where}: draft: {e}", mend=_AGAIN) from None


def _compare(ours: DraftConfig, theirs: DraftConfig, folder: Path) -> None:
    """firesteel.json against config.json, field by field. What config.json has no place for is taken from ours."""
    theirs = replace(theirs, extra={**ours.extra, **theirs.extra})
    if "block_size" not in get_spec(ours.algorithm).schema.model_fields:
        theirs = replace(theirs, block_size=ours.block_size)
    if SLIDING not in ours.layer_types:
        theirs = replace(theirs, sliding_window=ours.sliding_window)
    if not ours.markov_rank:
        theirs = replace(theirs, markov_head=ours.markov_head)
    if not (ours.confidence_head and ours.markov_rank):
        theirs = replace(theirs, confidence_with_markov=ours.confidence_with_markov)
    for f in fields(DraftConfig):
        one, other = getattr(ours, f.name), getattr(theirs, f.name)
        if one != other:
            raise CheckpointError(
                f"{f.name} is {one!r} in {folder / CONTRACT}, {other!r} in {folder / CONFIG}", mend="undo the edit, or export the drafter again"
            )


def _check_values(tensors: dict[str, Tensor], keys: dict[str, Key], dtype: torch.dtype, *, foreign: bool, where: str) -> None:
    for name, key in keys.items():
        tensor, wanted = tensors[name], key.dtype(dtype)
        # Others store the confidence head in the precision of the rest.
        if tensor.dtype != wanted and not (foreign and key.kind == "float32" and tensor.dtype == dtype):
            raise CheckpointError(f"{where}: {name} is {tensor.dtype}, the configuration gives {wanted}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{where}: {name} is not finite", mend=_AGAIN)


def _target_ids(tensors: dict[str, Tensor], config: DraftConfig, where: str) -> Tensor:
    """`d2t` and `t2d` -> target ids, if both tables tell the same."""
    target_ids = tensors[D2T] + torch.arange(config.draft_vocab_size)
    try:
        marks = vocab_tables(target_ids, config.vocab_size)[1]
    except CheckpointError as e:
        raise CheckpointError(f"{where}: d2t: {e.message}", mend="d2t holds offsets: target id = draft id + d2t[draft id]") from None
    if not torch.equal(marks, tensors[T2D]):
        first = int((marks != tensors[T2D]).nonzero()[0])
        raise CheckpointError(
            f"{where}: d2t names {int(marks.sum())} target tokens, t2d marks {int(tensors[T2D].sum())}; the first they disagree about is {first}",
            mend="the two tables come from different drafters",
        )
    return target_ids
