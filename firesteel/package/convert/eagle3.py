"""The EAGLE-3 layout of SafeAILab, which SpecForge trains and SGLang and vLLM serve: `midlayer.*`, `fc`, `lm_head`, `d2t`, `t2d`.

config.json is a Llama's with `draft_vocab_size`. Layers to capture are usually not in it: the published rule takes the states before
layers 2, L // 2 and L - 3 of a target with L layers. Where `eagle_config` lists them, they are 0-based and name the layer whose output is
taken. The residual stream is the bare feature, and a step hands on the state before the last norm.
Sources: EAGLE's `eagle/model/cnets.py` and `modeling_*_kv.py`, SpecForge's `llama3_eagle.py`, SGLang's `set_eagle3_layers_to_capture`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from firesteel.drafters.config import FULL
from firesteel.errors import CheckpointError
from firesteel.package.convert.fields import Fields
from firesteel.package.convert.foreign import Foreign, assemble, read_layer_ids, read_layers
from firesteel.package.convert.out import Written, full_config, layer_outputs, own_tables, refuse
from firesteel.package.export import vocab_tables
from firesteel.package.keys import D2T, HEAD, T2D

NAME, ARCHITECTURE = "eagle3", "LlamaForCausalLMEagle3"
_LISTED = "eagle_config.eagle_aux_hidden_state_layer_ids"
_STEPS = 7


def read(folder: Path, fields: Fields) -> Foreign:
    """Read a checkpoint of this layout.

    Raises:
        CheckpointError: as `foreign.assemble`, or a field contradicts the layout.
    """
    hidden, heads = fields.data.get("hidden_size"), fields.data.get("num_attention_heads")
    whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0
    values = read_layers(fields, head_dim=hidden // heads if whole and hidden and heads else None, rope_theta=10000.0)
    if values["num_layers"] != 1 or values["layer_types"] != (FULL,):
        raise CheckpointError(
            f"{fields.where}: num_hidden_layers is {values['num_layers']}, layer_types {list(values['layer_types'])}; this layout has one full layer"
        )
    target_layers = fields.one("target_layers", "num_target_layers", rule=None)
    vocab = fields.declared(int, "draft_vocab_size")
    if vocab is None:
        raise CheckpointError(f"{fields.where} does not say draft_vocab_size", mend="state it; it equals vocab_size where all tokens are drafted")
    width = fields.declared(int, "target_hidden_size")
    values |= {
        "algorithm": fields.one("algorithm", rule="eagle3"),
        "draft_vocab_size": vocab,
        "target_hidden_size": values["hidden_size"] if width is None else width,
        "layer_ids": _layer_ids(fields, target_layers),
        "block_size": fields.one("block_size", rule=_STEPS, because=f"block_size: {_STEPS} steps, as EAGLE-3 is trained; say block_size=N for another"),
        "mask_token_id": None,
        "sample_from_anchor": True,
        "causal": True,
        "extra": {
            "layer_style": "llama",
            "norm_before_residual": fields.one("norm_before_residual", "norm_before_residual", rule=False),
            "norm_before_fc": fields.one("norm_before_fc", "norm_before_fc", rule=False),
            "fc_norm": fields.one("fc_norm", "fc_norm", rule=False),
            "norm_output": _norm_output(fields),
        },
    }
    return assemble(fields, NAME, folder, values, target_layers, {"midlayer.": "layers.0."})


def write(found: Foreign, target_layers: int | None, embed: Tensor | None, head: Tensor | None) -> Written:
    """An EAGLE-3 drafter in this layout; a full vocabulary takes the target's LM head `[V, H]` into the file.

    Raises:
        CheckpointError: the layout has no place for something of the drafter.
    """
    c = found.config
    wanted = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False, "layer_style": "llama"}
    refuse("sglang", found, {"num_layers": (1,), "layer_types": ((FULL,),)}, whole_vocabulary=False)
    for name, value in wanted.items():
        if c.extra[name] != value:
            raise CheckpointError(
                f"{name} is {c.extra[name]!r}, but the sglang layout of eagle3 has {value!r}", mend="serve this drafter from the speculators format"
            )
    data: dict[str, Any] = full_config(found, ARCHITECTURE, target_layers, model_type="llama") | {
        "draft_vocab_size": c.draft_vocab_size,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layer_outputs(found, target_layers, lowest=0)},
    }
    if c.extra["fc_norm"]:
        data["fc_norm"] = True
    tensors = {f"midlayer.{name[9:]}" if name.startswith("layers.0.") else name: t for name, t in found.tensors.items()} | own_tables(found, None, head)
    if HEAD not in tensors:
        raise CheckpointError("the sglang layout of eagle3 holds the LM head, and this drafter shares its target's", mend="give --target")
    if found.target_ids is not None:
        tensors[D2T], tensors[T2D] = vocab_tables(found.target_ids, c.vocab_size)
    return Written(data, tensors, ())


def _layer_ids(fields: Fields, target_layers: int | None) -> tuple[int, ...]:
    used = fields.declared(bool, "eagle_config.use_aux_hidden_state")
    if used is False:
        raise CheckpointError(f"{fields.where}: eagle_config.use_aux_hidden_state is False: the drafter reads no captured layers, so it is no EAGLE-3")
    fields.use("eagle_aux_hidden_state_layer_ids")
    flat = fields.data.get("eagle_aux_hidden_state_layer_ids")
    if flat is not None and "layer_ids" not in fields.given:
        raise CheckpointError(
            f"{fields.where}: eagle_aux_hidden_state_layer_ids is {flat} outside eagle_config: states before a layer or outputs of it, nobody knows",
            mend="say them as Firesteel counts: layer_ids=[...] (states before a layer)",
        )
    if fields.declared(list, _LISTED) is not None or "layer_ids" in fields.given:
        return read_layer_ids(fields, _LISTED, target_layers=target_layers)
    if target_layers is None:
        raise CheckpointError(
            f"{fields.where} does not say which layers are captured, and the layout's rule needs the number of the target's layers",
            mend="give --target, target_layers=N, or layer_ids=[...]",
        )
    ids = (2, target_layers // 2, target_layers - 3)
    fields.notes.append(f"layer_ids: {list(ids)}, the layout's rule for a target of {target_layers} layers")
    if list(ids) != sorted(set(ids)):
        raise CheckpointError(f"{fields.where}: the layout's rule gives layers {list(ids)} of {target_layers}", mend="say layer_ids=[...]")
    return ids


def _norm_output(fields: Fields) -> bool:
    """SpecForge calls the norm before the LM head by this name, vLLM and speculators a state handed on after the norm."""
    fields.use("norm_output")
    declared, given = fields.data.get("norm_output"), fields.override("norm_output")
    if declared is not None and given is None:
        raise CheckpointError(
            f"{fields.where}: norm_output is {declared!r}, which has two meanings: SpecForge's norm before the LM head, vLLM's state handed on after it",
            mend="say norm_output=true if a step hands on the state after the last norm, else norm_output=false",
        )
    return bool(given)
