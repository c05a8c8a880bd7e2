"""An MTP head as speculators 0.9.0 takes it out of a model's files (`MTPConverter`): the target's own tensors under the peer's names.

What the file leaves out is the target's final norm, which a head of ours carries: such a file is read together with its target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firesteel.drafters.config import DraftConfig
from firesteel.drafters.mtp_format import MODEL_TYPE, TARGET_NORM, MtpFields, mtp_from_json, plain_layer
from firesteel.drafters.target_layer import check_layer, make_layer_config
from firesteel.errors import CheckpointError, FiresteelError
from firesteel.package.config_json import read_frame
from firesteel.package.convert.fields import HARMLESS, Fields
from firesteel.package.convert.files import read_tensors, weights_name
from firesteel.package.convert.foreign import Foreign
from firesteel.package.keys import check_algorithm, check_tensors, drafter_keys

NAME, ALGORITHM = "speculators MTP", "mtp"
_LAYER = "transformer_layer_config"
# Beginnings of names, the longer ones first.
_RENAME = {
    "mtp_layers.0.input_proj.": "mtp.fc.",
    "mtp_layers.0.final_layernorm.": "mtp.norm.",
    "mtp_layers.0.hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
    "mtp_layers.0.token_layernorm.": "mtp.pre_fc_norm_embedding.",
    "mtp_layers.0.": "mtp.layers.0.",
}
# A table that the peer keeps beside the head and never trains, nor fills before it saves.
_UNUSED = "verifier_lm_head.weight"


def read(folder: Path, fields: Fields) -> Foreign:
    """Read a head; its final norm is still missing (`complete`).

    Raises:
        CheckpointError: no layer that is known, a field that nobody knows, or tensors that are not those of this layer.
    """
    where, layer = fields.where, fields.data.get(_LAYER)
    tokens, verifier = read_frame(fields.data, where)
    heads = fields.declared(int, "num_nextn_predict_layers")
    if heads not in (None, 1):
        raise CheckpointError(f"{where}: num_nextn_predict_layers is {heads}; Firesteel's MTP heads have one layer")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{where}: {_LAYER} is {layer!r}, not the configuration of the target's layers")
    for name in ("vocab_size", "num_hidden_layers"):
        if type(layer.get(name)) is not int:
            raise CheckpointError(f"{where}: {_LAYER}.{name} is {layer.get(name)!r}, not a number", mend="state it as in the target's config.json")
    steps = fields.one("block_size", rule=tokens)
    config = _config(fields, layer, steps)
    layers = fields.one("target_layers", rule=layer["num_hidden_layers"])
    fields.finish()
    what = weights_name(folder)
    tensors = {_renamed(name): tensor for name, tensor in read_tensors(folder).items() if name != _UNUSED}
    check_tensors(tensors, {name: key for name, key in drafter_keys(config).items() if name != TARGET_NORM}, what=what)
    dtype = tensors["mtp.fc.weight"].dtype
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or not tensor.is_floating_point():
            raise CheckpointError(f"{what}: {name} is {tensor.dtype}, mtp.fc.weight is {dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{what}: {name} is not finite", mend="fetch the file again")
    return Foreign(folder, NAME, config, tensors, dtype, None, None, None, layers, verifier, None, tuple(fields.notes))


def complete(found: Foreign, norm: Callable[[], Tensor] | None) -> Foreign:
    """The head with its target's final norm: what it multiplies by, `[h]`.

    Raises:
        CheckpointError: the target is not known.
    """
    if norm is None:
        raise CheckpointError(
            f"{found.folder}: an MTP head in speculators' layout leaves out the final norm of its target, which every step needs",
            mend="give the target that it belongs to: --target TARGET",
        )
    return replace(found, tensors=found.tensors | {TARGET_NORM: norm().detach().to("cpu", torch.float32)})


def _config(fields: Fields, layer: dict[str, Any], steps: int) -> DraftConfig:
    """The head's configuration; marks the fields that the layer's class has as read."""
    try:
        check_layer(layer)
        plain = plain_layer(layer)
        known = set(type(make_layer_config(plain))().to_dict()) | HARMLESS | {"torch_dtype", "rope_theta", "rope_scaling"}
        fields.use(*(f"{_LAYER}.{name}" for name in known), "speculators_model_type", "speculators_version", "speculators_config", "dtype", "torch_dtype")
        own = MtpFields(
            model_type=MODEL_TYPE,
            text_config=plain,
            vocab_size=layer["vocab_size"],
            block_size=steps,
            layer_ids=(layer["num_hidden_layers"],),
            num_speculative_tokens=steps,
        )
        config = DraftConfig(**mtp_from_json(own, fields.where))
        check_algorithm(config)
    except FiresteelError as e:
        raise CheckpointError(f"{fields.where}: {e.message.removeprefix(f'{fields.where}: ')}", mend=e.mend) from None
    return config


def _renamed(name: str) -> str:
    begin = next((b for b in _RENAME if name.startswith(b)), "")
    return _RENAME.get(begin, "") + name.removeprefix(begin)
