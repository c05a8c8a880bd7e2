"""DeepSpec's layout: `Qwen3DSparkModel` (DSpark, and DFlash as a DSpark without heads) and `Qwen3Eagle3Model`.

Settings lie at the top of config.json. Layers are 0-based and name the layer whose output is taken (-1: the embeddings), slot k predicts
the token k + 1 after the anchor, blocks are bidirectional, the vocabulary is whole, and embedding and LM head are copies of the target's.
Source: DeepSpec's `deepspec/modeling/{dspark,eagle3}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from firesteel.drafters.config import FULL
from firesteel.errors import CheckpointError
from firesteel.package.convert.fields import Fields
from firesteel.package.convert.foreign import Foreign, assemble, read_layer_ids, read_layers
from firesteel.package.convert.out import Written, block_tensors, full_config, layer_outputs, refuse
from firesteel.package.keys import HEAD

NAME, DSPARK, EAGLE3 = "deepspec", "Qwen3DSparkModel", "Qwen3Eagle3Model"


def read(folder: Path, fields: Fields) -> Foreign:
    """Read a checkpoint of this layout.

    Raises:
        CheckpointError: as `foreign.assemble`, or a field contradicts the layout.
    """
    values = read_layers(fields)
    _only_full(fields, values)
    layers = fields.one("target_layers", "num_target_layers", rule=None)
    if fields.data["architectures"] == [EAGLE3]:
        values |= _eagle(fields, layers)
        if values["num_layers"] != 1:
            raise CheckpointError(
                f"{fields.where}: num_hidden_layers is {values['num_layers']}; of these layers each reads pairs, of Firesteel's the first only"
            )
    else:
        values |= dspark_values(fields, "", layers)
        fields.must("sample_from_anchor", "sample_from_anchor", rule=True, because="slot k of a DeepSpec drafter predicts the token k + 1 after the anchor")
        fields.must("causal", "is_causal", rule=False, because="blocks of a DeepSpec drafter are bidirectional")
    fields.use("target_model_name_or_path", "target_model_type", "target_text_model_type")
    verifier = fields.data.get("target_model_name_or_path")
    return assemble(fields, NAME, folder, values, layers, verifier=verifier if isinstance(verifier, str) else None)


def dspark_values(fields: Fields, group: str, target_layers: int | None) -> dict[str, Any]:
    """Values of `DraftConfig` that the settings of a block drafter give; they lie in `group` (such as `dflash_config.`) or at the top."""
    rank = fields.declared(int, f"{group}markov_rank") or 0
    confidence = fields.declared(bool, f"{group}enable_confidence_head") or False
    kind = fields.declared(str, f"{group}markov_head_type")
    with_markov = fields.declared(bool, f"{group}confidence_head_with_markov")
    if rank and kind is None:
        raise CheckpointError(f"{fields.where}: {group}markov_rank is {rank}, but markov_head_type is not there", mend="state it: vanilla, gated or rnn")
    if confidence and with_markov is None:
        raise CheckpointError(f"{fields.where}: enable_confidence_head is True, but confidence_head_with_markov is not there", mend="state it")
    if confidence and with_markov and not rank:
        raise CheckpointError(f"{fields.where}: confidence_head_with_markov is True, markov_rank is {rank}: there is no Markov embedding to read")
    top = {"vocab_size": fields.data.get("vocab_size"), "hidden_size": fields.data.get("hidden_size")}
    return {
        "algorithm": fields.one("algorithm", rule="dspark" if rank or confidence else "dflash"),
        "draft_vocab_size": top["vocab_size"],
        "target_hidden_size": top["hidden_size"],
        "layer_ids": read_layer_ids(fields, f"{group}target_layer_ids", target_layers=target_layers),
        "block_size": fields.one("block_size", "block_size", *([f"{group}block_size"] if group else [])),
        "mask_token_id": fields.one("mask_token_id", f"{group}mask_token_id"),
        "sample_from_anchor": True,
        "markov_rank": rank,
        "markov_head": kind if rank and kind else "vanilla",
        "confidence_head": confidence,
        "confidence_with_markov": bool(with_markov) if confidence else True,
    }


def write(found: Foreign, target_layers: int | None, embed: Tensor | None, head: Tensor | None) -> Written:
    """A block drafter in this layout.

    Args:
        embed, head: `[V, H]` the target's tables, which DeepSpec itself wants in the file; None leaves them out.

    Raises:
        CheckpointError: the layout has no place for something of the drafter.
    """
    c = found.config
    refuse(NAME, found, {"algorithm": ("dspark", "dflash"), "sample_from_anchor": (True,), "causal": (False,), "layer_types": ((FULL,) * c.num_layers,)})
    data: dict[str, Any] = full_config(found, DSPARK, target_layers) | {
        "block_size": c.block_size,
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": layer_outputs(found, target_layers, lowest=-1),
        # How many anchors a training step draws; the loader asks for the field, decoding does not use it.
        "num_anchors": 512,
        "markov_rank": c.markov_rank,
        "enable_confidence_head": c.confidence_head,
    }
    if c.markov_rank:
        data["markov_head_type"] = c.markov_head
    if c.confidence_head:
        data["confidence_head_with_markov"] = c.confidence_with_markov and c.markov_rank > 0
    tensors, notes = block_tensors(found, embed, head)
    if HEAD not in tensors:
        notes = (*notes, "embed_tokens and lm_head are left out (vLLM and SGLang share the target's); for DeepSpec itself convert with --target")
    return Written(data, tensors, notes)


def _eagle(fields: Fields, layers: int | None) -> dict[str, Any]:
    fields.use("step_loss_decay", "draft_num_hidden_layers")
    return {
        "algorithm": fields.one("algorithm", rule="eagle3"),
        "draft_vocab_size": fields.data.get("vocab_size"),
        "target_hidden_size": fields.data.get("hidden_size"),
        "layer_ids": read_layer_ids(fields, "target_layer_ids", target_layers=layers),
        "block_size": fields.one("block_size", "ttt_length"),
        "mask_token_id": None,
        "sample_from_anchor": True,
        "causal": True,
        "extra": {"layer_style": "qwen3", "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
    }


def _only_full(fields: Fields, values: dict[str, Any]) -> None:
    if set(values["layer_types"]) != {FULL}:
        raise CheckpointError(
            f"{fields.where}: layer_types is {list(values['layer_types'])}, but DeepSpec's masks have no window: no engine would know what was trained"
        )
