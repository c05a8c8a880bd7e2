"""Foreign: a checkpoint in Firesteel's terms, whatever layout it was read from; and the steps that all layouts share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from firesteel.drafters.config import DraftConfig
from firesteel.drafters.layer_json import LayerFields, layers_from_json
from firesteel.drafters.registry import get_spec
from firesteel.drafters.warm import vocabulary_tensors
from firesteel.errors import CheckpointError, FiresteelError
from firesteel.package.contract import Contract
from firesteel.package.convert.fields import ABSENT, Fields
from firesteel.package.convert.files import read_tensors, weights_name
from firesteel.package.export import vocab_tables
from firesteel.package.keys import D2T, EMBED, HEAD, T2D, Key, check_tensors, drafter_keys


@dataclass(frozen=True)
class Foreign:
    """A checkpoint as read.

    Attributes:
        layout: name of the layout it had.
        tensors: the drafter's state dict, as stored (CPU).
        dtype: precision of the weights.
        target_ids: `[V_draft]` int64, ascending, or None for a full vocabulary.
        head_rows, embed: `[V_draft, H]` and `[V, H]` tables of its own, or None where the target's are shared.
        target_layers: layers of its target, or None where nobody said.
        verifier: name of its target, or None.
        contract: its train/serve contract, if it has one.
        notes: rules of the layout that filled what the file leaves out.
    """

    folder: Path
    layout: str
    config: DraftConfig
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    target_ids: Tensor | None
    head_rows: Tensor | None
    embed: Tensor | None
    target_layers: int | None
    verifier: str | None
    contract: Contract | None
    notes: tuple[str, ...]


def read_layers(fields: Fields, *, head_dim: int | None = None, rope_theta: float | None = None) -> dict[str, Any]:
    """Values of `DraftConfig` from the top-level fields of a Transformers config.

    Args:
        head_dim, rope_theta: the layout's rule where the file is silent.

    Raises:
        CheckpointError: a field is missing, contradictory, or asks for a RoPE or a window that Firesteel's engine would not apply.
    """
    names = [name for name in LayerFields.model_fields if name != "is_causal"]
    data: dict[str, Any] = {name: fields.data[name] for name in names if name in fields.data}
    fields.use(*names)
    _same_rope(data, fields.where)
    has_theta = any(isinstance(part, dict) and part.get("rope_theta") for part in (data.get("rope_parameters"), data.get("rope_scaling")))
    data["head_dim"] = fields.one("head_dim", "head_dim", rule=ABSENT if head_dim is None else head_dim, because=f"head_dim: {head_dim}, width by heads")
    if not has_theta:
        because = f"rope_theta: {rope_theta}, the layout's own where the file is silent"
        data["rope_theta"] = fields.one("rope_theta", "rope_theta", rule=ABSENT if rope_theta is None else rope_theta, because=because)
    try:
        layers = LayerFields.model_validate_json(json.dumps(data))
    except ValidationError as e:
        first = e.errors()[0]
        value = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        raise CheckpointError(
            f"{fields.where}: {'.'.join(map(str, first['loc']))}: {first['msg']}{value}", mend="state the field as the drafter was trained"
        ) from None
    return layers_from_json(layers, fields.where)


def read_layer_ids(fields: Fields, *places: str, target_layers: int | None) -> tuple[int, ...]:
    """Captured layers as Firesteel counts them, from 0-based indices of layers whose OUTPUT is taken (-1: the embeddings).

    The last layer is refused: the tools that write these layouts see it after the target's final norm, Firesteel and vLLM before.

    Raises:
        CheckpointError: nobody says them, file and user contradict each other, or the target has no such layer.
    """
    outputs = fields.declared(list, *places)
    given = fields.override("layer_ids")
    if outputs is None and given is None:
        raise CheckpointError(f"{fields.where} does not say {places[0]}", mend="say the captured layers as Firesteel counts them: layer_ids=[...]")
    ids = given if outputs is None else tuple(i + 1 for i in outputs)
    if given is not None and given != ids:
        raise CheckpointError(
            f"{fields.where}: {places[0]} is {list(outputs)}, that is layer_ids={list(ids)}, but layer_ids={list(given)} was given",
            mend="leave out layer_ids; Firesteel's ids are one higher than these",
        )
    check_layer_ids(ids, target_layers, f"{fields.where}: {places[0]}")
    if outputs is not None and target_layers is not None and max(ids) == target_layers:
        raise CheckpointError(
            f"{fields.where}: {places[0]} has {max(outputs)}, the last of {target_layers} layers: this layout takes it after the target's final norm",
            mend="Firesteel captures before the final norm; such a drafter cannot be converted",
        )
    return ids


def check_layer_ids(ids: Sequence[int], target_layers: int | None, what: str) -> None:
    """Ids in order and within the target.

    Raises:
        CheckpointError: names the ids.
    """
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or (target_layers is not None and ids[-1] > target_layers):
        within = "" if target_layers is None else f" of {target_layers}"
        raise CheckpointError(f"{what}: {list(ids)}, counted as states before a layer, are not ascending layers{within}")


def assemble(
    fields: Fields,
    layout: str,
    folder: Path,
    values: dict[str, Any],
    target_layers: int | None,
    rename: dict[str, str] | None = None,
    verifier: str | None = None,
) -> Foreign:
    """The checkpoint from its config's values and its tensors.

    Args:
        rename: beginnings of the layout's tensor names -> Firesteel's.

    Raises:
        CheckpointError: tensors are missing, unknown, of another shape or precision, or the vocabulary's tables are wrong.
    """
    where, what = fields.where, weights_name(folder)
    declared = fields.declared(str, "dtype", "torch_dtype") if "dtype" not in fields.given.get("ignore", ()) else None
    fields.use("dtype", "torch_dtype")
    fields.finish()
    try:
        config = DraftConfig(**values)
        with torch.device("meta"):  # whatever the engine does not have is refused here
            get_spec(config.algorithm).build(config)
        keys = drafter_keys(config)
    except FiresteelError as e:
        raise CheckpointError(f"{where}: {e.message}", mend=e.mend) from None
    tensors = {_renamed(name, rename or {}): tensor for name, tensor in read_tensors(folder).items()}
    ids = _target_ids(tensors, config, what)
    head, embed = tensors.pop(HEAD, None), tensors.pop(EMBED, None)
    if head is None and config.reduced_vocab:
        raise CheckpointError(f"{what} lacks {HEAD}: the rows of {config.draft_vocab_size} of {config.vocab_size} tokens")
    tables = {name: table for name, table in ((HEAD, head), (EMBED, embed)) if table is not None}
    extra = {HEAD: Key((config.draft_vocab_size, config.hidden_size)), EMBED: Key((config.vocab_size, config.hidden_size))}
    check_tensors(tensors | tables, keys | {name: extra[name] for name in tables}, what=what)
    dtype = tensors["fc.weight"].dtype
    if declared is not None and f"torch.{declared}" != str(dtype):
        raise CheckpointError(f"{where}: dtype is {declared!r}, but {what} holds {dtype}", mend="if the weights are right: ignore=[dtype]")
    for name, tensor in (tensors | tables).items():
        alone = name in keys and keys[name].kind == "float32" and tensor.dtype == torch.float32
        if tensor.dtype != dtype and not alone:
            raise CheckpointError(f"{what}: {name} is {tensor.dtype}, fc.weight is {dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{what}: {name} is not finite", mend="fetch the file again")
    if ids is not None and bool((ids[1:] <= ids[:-1]).any()):
        # Draft ids are only names: sorted by target id, the drafter is the same, and readers that cut the target's head by t2d agree.
        order = ids.argsort()
        ids, head = ids[order], head[order] if head is not None else None
        tensors |= {name: tensors[name][order] for name in vocabulary_tensors(config)}
    return Foreign(folder, layout, config, tensors, dtype, ids, head, embed, target_layers, verifier, None, tuple(fields.notes))


def share(found: Foreign, embed: Tensor, head: Tensor) -> Foreign:
    """Leave out tables that are the target's own, bit for bit in the checkpoint's precision: `[V, H]` embedding and LM head."""

    def same(table: Tensor | None, target: Tensor) -> bool:
        return table is not None and table.shape == target.shape and torch.equal(table, target.detach().to("cpu", table.dtype))

    kept = found.config.reduced_vocab or not same(found.head_rows, head)
    return replace(found, embed=None if same(found.embed, embed) else found.embed, head_rows=found.head_rows if kept else None)


def _same_rope(data: dict[str, Any], where: str) -> None:
    """`rope_parameters` beside the older `rope_scaling` and `rope_theta` must say the same."""
    new, old = data.get("rope_parameters"), data.get("rope_scaling")
    if isinstance(new, dict):
        theta = data.get("rope_theta")
        if theta is not None and new.get("rope_theta", theta) != theta:
            raise CheckpointError(f"{where}: rope_theta is {theta!r}, rope_parameters.rope_theta is {new['rope_theta']!r}")
        if isinstance(old, dict) and _plain(new) != _plain(old):
            raise CheckpointError(f"{where}: rope_parameters is {new}, rope_scaling is {old}")


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_type": kind} | {k: v for k, v in rope.items() if k not in ("type", "rope_type", "rope_theta")}


def _renamed(name: str, rename: dict[str, str]) -> str:
    begin = next((b for b in rename if name.startswith(b)), None)
    return name if begin is None else rename[begin] + name[len(begin) :]


def _target_ids(tensors: dict[str, Tensor], config: DraftConfig, what: str) -> Tensor | None:
    """Take the tables out of `tensors` and turn them into target ids; both must be there and tell the same."""
    d2t, t2d = tensors.pop(D2T, None), tensors.pop(T2D, None)
    if d2t is None or t2d is None:
        if config.reduced_vocab or d2t is not None or t2d is not None:
            lacks = D2T if d2t is None else T2D
            raise CheckpointError(
                f"{what} lacks {lacks}, but the drafter proposes {config.draft_vocab_size} of {config.vocab_size} tokens: nobody would know which",
                mend="both tables must be in the file; ask whoever trained the drafter",
            )
        return None
    if d2t.shape != (config.draft_vocab_size,) or d2t.is_floating_point():
        raise CheckpointError(f"{what}: d2t is {d2t.dtype} of shape {list(d2t.shape)}, the configuration gives {config.draft_vocab_size} whole numbers")
    ids = d2t.long() + torch.arange(config.draft_vocab_size)
    try:
        marks = vocab_tables(ids, config.vocab_size)[1]
    except CheckpointError as e:
        raise CheckpointError(f"{what}: d2t: {e.message}", mend="d2t holds offsets: target id = draft id + d2t[draft id]") from None
    if t2d.shape != marks.shape or not torch.equal(marks, t2d.bool()):
        raise CheckpointError(f"{what}: d2t names {int(marks.sum())} target tokens, t2d marks {int(t2d.sum())}, not the same ones")
    if not config.reduced_vocab and bool(d2t.any()):
        raise CheckpointError(f"{what}: d2t reorders a full vocabulary of {config.vocab_size} tokens, which no engine expects")
    return ids if config.reduced_vocab else None
