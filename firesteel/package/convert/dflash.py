"""Layouts with a `dflash_config`: z-lab's and SpecForge's `DFlashDraftModel`, SpecForge's `DSparkDraftModel`; SGLang serves both.

The two DFlash layouts are one: 0-based layers whose output is taken, slot k predicts the token k after the anchor (slot 0 nothing). In
SpecForge's DSpark slot k predicts the token k + 1 after the anchor. Embedding and LM head are the target's. Sliding layers are causal in
SpecForge and not in z-lab's own code, and no field tells the two apart, so the user must say `causal`.
Sources: z-lab's `dflash/model.py`, SpecForge's `specforge/{modeling/draft,algorithms/common}`, SGLang's draft configurations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from firesteel.drafters.config import FULL, SLIDING
from firesteel.errors import CheckpointError
from firesteel.package.convert.deepspec import dspark_values
from firesteel.package.convert.fields import Fields
from firesteel.package.convert.foreign import Foreign, assemble, read_layers
from firesteel.package.convert.out import Written, block_tensors, full_config, layer_outputs, refuse

NAME, DFLASH, DSPARK = "dflash_config", "DFlashDraftModel", "DSparkDraftModel"
_GROUP = "dflash_config."
# Early heads of SpecForge lay in a container, which its own loader takes off too.
_RENAME = {"logit_head.markov_head.": "markov_head.", "logit_head.confidence_head.": "confidence_head."}


def read(folder: Path, fields: Fields) -> Foreign:
    """Read a checkpoint of this layout.

    Raises:
        CheckpointError: as `foreign.assemble`, or a convention that the layout does not declare.
    """
    architecture = fields.data["architectures"][0]
    values = read_layers(fields)
    layers = fields.one("target_layers", "num_target_layers", f"{_GROUP}num_target_layers", rule=None)
    values |= dspark_values(fields, _GROUP, layers)
    anchor = architecture == DSPARK
    why = f"slot k of a {architecture} predicts the token {'k + 1' if anchor else 'k'} after the anchor"
    values["sample_from_anchor"] = fields.must("sample_from_anchor", "sample_from_anchor", f"{_GROUP}sample_from_anchor", rule=anchor, because=why)
    _check_slots(fields, architecture, values)
    sliding, full = SLIDING in values["layer_types"], FULL in values["layer_types"]
    if not sliding:
        fields.must("causal", "is_causal", rule=False, because="full attention of this layout is bidirectional within a block")
        values["causal"] = False
    else:
        values["causal"] = fields.one("causal", "is_causal")
        if values["causal"] and full:
            raise CheckpointError(
                f"{fields.where}: layer_types has sliding and full layers, and causal=True: sliding layers would be causal, full ones are not",
                mend="Firesteel's drafters are one or the other in all layers; this one cannot be converted",
            )
    fields.declared(float, f"{_GROUP}confidence_head_alpha")
    mode = fields.declared(str, f"{_GROUP}attention_mode")
    heads = "mha" if values["num_heads"] == values["num_kv_heads"] else "gqa"
    if mode is not None and mode != heads:
        raise CheckpointError(
            f"{fields.where}: {_GROUP}attention_mode is {mode!r}, but {values['num_heads']} heads over {values['num_kv_heads']} are {heads!r}"
        )
    width = fields.declared(int, "target_hidden_size")
    values["target_hidden_size"] = values["target_hidden_size"] if width is None else width
    return assemble(fields, NAME, folder, values, layers, _RENAME)


def _check_slots(fields: Fields, architecture: str, values: dict[str, Any]) -> None:
    wanted = "dspark" if architecture == DSPARK else None
    projector = fields.declared(str, f"{_GROUP}projector_type")
    if projector not in (None, wanted, "dflash" if wanted is None else wanted):
        raise CheckpointError(f"{fields.where}: {_GROUP}projector_type is {projector!r}, architectures is [{architecture!r}]: not a head that Firesteel has")
    if fields.declared(bool, f"{_GROUP}shift_label"):
        raise CheckpointError(
            f"{fields.where}: {_GROUP}shift_label is True, but architectures is [{architecture!r}]: which token a slot predicts is not known",
            mend="only whoever trained the drafter can tell; if it was trained as its architecture says: set shift_label to false in the file",
        )
    if fields.declared(int, f"{_GROUP}pure_draft_prefix_len"):
        raise CheckpointError(
            f"{fields.where}: {_GROUP}pure_draft_prefix_len is {fields.data['dflash_config']['pure_draft_prefix_len']}, which only Domino drafters have"
        )
    if wanted is None and (values["markov_rank"] or values["confidence_head"]):
        raise CheckpointError(f"{fields.where}: markov_rank is {values['markov_rank']}, but architectures is [{architecture!r}], which has no heads")
    if wanted and "algorithm" not in fields.given:
        values["algorithm"] = wanted


def write(found: Foreign, target_layers: int | None, embed: Tensor | None, head: Tensor | None) -> Written:
    """A block drafter as SGLang and SpecForge read it.

    Raises:
        CheckpointError: the layout has no place for something of the drafter.
    """
    c = found.config
    anchor = c.algorithm == "dspark"
    refuse("sglang", found, {"sample_from_anchor": (anchor,), "causal": (False,), "layer_types": ((FULL,) * c.num_layers,)})
    own: dict[str, Any] = {"mask_token_id": c.mask_token_id, "target_layer_ids": layer_outputs(found, target_layers, lowest=-1 if anchor else 0)}
    if anchor:
        own |= {
            "projector_type": "dspark",
            "attention_mode": "mha" if c.num_heads == c.num_kv_heads else "gqa",
            "markov_rank": c.markov_rank,
            "markov_head_type": c.markov_head,
            "enable_confidence_head": c.confidence_head,
            "confidence_head_with_markov": c.confidence_head and c.confidence_with_markov and c.markov_rank > 0,
        }
    data = full_config(found, DSPARK if anchor else DFLASH, target_layers) | {"block_size": c.block_size, "dflash_config": own}
    tensors, notes = block_tensors(found, None, None)
    return Written(data, tensors, notes)
