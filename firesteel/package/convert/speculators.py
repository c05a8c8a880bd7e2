"""The speculators format as source and destination of a conversion; with a known target the contract is written beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from firesteel.artifact import disk_error, write_atomic
from firesteel.drafters.layer_json import LayerFields, window_of
from firesteel.drafters.registry import get_spec, names
from firesteel.package.config_json import to_speculators
from firesteel.package.contract import Contract
from firesteel.package.convert import mtp
from firesteel.package.convert.fields import HARMLESS, Fields
from firesteel.package.convert.files import CONFIG, WEIGHTS
from firesteel.package.convert.foreign import Foreign
from firesteel.package.export import export, vocab_tables
from firesteel.package.keys import D2T, EMBED, HEAD, T2D
from firesteel.package.load import load

NAME = "speculators"
# The frame around an algorithm's own fields; the last two tell how the peer trained or built it, and shape nothing.
_FRAME = (
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "draft_vocab_size",
    "target_hidden_size",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "embed_requires_grad",
    "has_no_defaults_at_init",
)
# Readers of the format disagree about these where they are absent, so reading refuses that.
_SAID = ("sample_from_anchor", "norm_before_residual")


def read(folder: Path, fields: Fields) -> Foreign:
    """Read a checkpoint of this format, one of ours or another's.

    Raises:
        CheckpointError: as `load.load`, a field that nobody knows, or file and user contradict each other.
    """
    kind = fields.data["speculators_model_type"]
    if kind == mtp.ALGORITHM:
        return mtp.read(folder, fields)
    schema = get_spec(kind).schema.model_fields if kind in names() else dict.fromkeys(fields.data)  # an unknown kind is refused by `load`
    said = {name: fields.one(name, name) for name in _SAID if name in schema and name in fields.given}
    fields.use(*_FRAME, *schema, *(f"transformer_layer_config.{name}" for name in (*LayerFields.model_fields, "dtype", "torch_dtype", *HARMLESS)))
    layers = fields.one("target_layers", rule=None)
    fields.finish()
    loaded = load(folder, said=said)
    if layers is None and loaded.contract is not None:
        layers = loaded.contract.target_layers
    return Foreign(
        folder=folder,
        layout=NAME,
        config=loaded.config,
        tensors=loaded.tensors,
        dtype=loaded.dtype,
        target_ids=loaded.target_ids,
        head_rows=loaded.head_rows,
        embed=loaded.embed,
        target_layers=layers,
        verifier=loaded.verifier,
        contract=loaded.contract,
        notes=tuple(fields.notes),
    )


def write(found: Foreign, folder: Path, contract: Contract | None, architecture: str | None) -> None:
    """Write config.json and model.safetensors, and with a contract firesteel.json.

    Args:
        contract: None where the target is not known, or the drafter has tables of its own.
        architecture: the target's, or None.

    Raises:
        CheckpointError: contract and drafter contradict each other, or the format has no place for something.
    """
    if contract is not None:
        export(folder, found.tensors, found.config, contract, target_ids=found.target_ids, head_rows=found.head_rows, dtype=found.dtype)
        return
    tensors = dict(found.tensors)
    if found.target_ids is not None:
        tensors[D2T], tensors[T2D] = vocab_tables(found.target_ids, found.config.vocab_size)
    tensors |= {name: table for name, table in ((HEAD, found.head_rows), (EMBED, found.embed)) if table is not None}
    data = _describe(found, architecture)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    except OSError as e:
        raise disk_error(e, folder / WEIGHTS) from e
    write_atomic(folder / CONFIG, json.dumps(data, indent=2) + "\n")


def _describe(found: Foreign, architecture: str | None) -> dict[str, Any]:
    """config.json of a drafter whose target is not known: the frame's facts of the target are left empty."""
    c = found.config
    nameless = Contract(
        target_name=found.verifier or "pypi:",  # no name that other readers would look up
        target_fingerprint="",
        target_architecture=architecture or "",
        target_layers=max(c.layer_ids) if found.target_layers is None else found.target_layers,
        target_hidden_size=c.target_hidden_size,
        vocab_size=c.vocab_size,
        draft_vocab_size=c.draft_vocab_size,
        target_softcap=None,
        target_logit_scale=1.0,
        layer_ids=c.layer_ids,
        layer_convention="hidden_states",
        captured_stream="residual",
        block_size=c.block_size,
        mask_token_id=c.mask_token_id,
        sample_from_anchor=c.sample_from_anchor,
        causal=c.causal,
        sliding_window=window_of(c),
        rope_theta=c.rope_theta,
        rope_scaling=c.rope_scaling,
        thinking=None,
        temperatures=(),
        promise=None,
        speculative_tokens=c.num_drafts,
        versions={},
    )
    data = to_speculators(c, nameless, found.dtype)
    if architecture is None and "speculators_config" in data:
        data["speculators_config"]["verifier"]["architectures"] = []
    return data
