"""Checkpoints of block drafters (dspark, dflash): tensors and config.json fields, as vLLM 0.32 loads and speculators 0.9.0 writes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.drafters.heads import MARKOV_KINDS
from firesteel.drafters.keys import Key, layer_keys
from firesteel.drafters.layer_json import LayerFields, ReadStrictly, read_layer_types
from firesteel.errors import CheckpointError


class BlockFields(ReadStrictly):
    """Own fields of a dflash checkpoint."""

    aux_hidden_state_layer_ids: tuple[int, ...] = Field(min_length=1)
    mask_token_id: int
    block_size: int
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False


class DSparkFields(BlockFields):
    """Own fields of a dspark checkpoint. `sample_from_anchor` must be there: absent, speculators takes it for true, vLLM for false."""

    sample_from_anchor: bool
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"]
    enable_confidence_head: bool
    confidence_head_with_markov: bool


def block_keys(config: DraftConfig) -> dict[str, Key]:
    """Backbone and heads: the drafter's state dict."""
    h = config.hidden_size
    keys = {"fc.weight": Key((h, len(config.layer_ids) * config.target_hidden_size)), "hidden_norm.weight": Key((h,)), "norm.weight": Key((h,))}
    for i in range(config.num_layers):
        keys |= layer_keys(config, f"layers.{i}.")
    return keys | _head_keys(config)


def block_to_json(config: DraftConfig) -> dict[str, Any]:
    """Own fields of a backbone.

    `is_causal` is written into the layers' part where a reader would otherwise guess: sliding layers count as causal in vLLM.
    """
    layers = {"is_causal": config.causal} if SLIDING in config.layer_types or config.causal else {}
    return {
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": list(config.layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.causal,
    }


def dspark_to_json(config: DraftConfig) -> dict[str, Any]:
    """Own fields of backbone and heads."""
    return block_to_json(config) | {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": sees_markov(config),
    }


def block_from_json(own: BlockFields, layers: LayerFields, where: str) -> dict[str, Any]:
    """Values of `DraftConfig` from own fields."""
    return {
        "layer_ids": own.aux_hidden_state_layer_ids,
        "mask_token_id": own.mask_token_id,
        "block_size": own.block_size,
        "sample_from_anchor": own.sample_from_anchor,
        "causal": _causal(own, layers, read_layer_types(layers, where), where),
    }


def dspark_from_json(own: DSparkFields, layers: LayerFields, where: str) -> dict[str, Any]:
    """Values of `DraftConfig` from own fields.

    Raises:
        CheckpointError: a confidence head that reads a Markov embedding which is not there.
    """
    if own.enable_confidence_head and own.confidence_head_with_markov and not own.markov_rank:
        raise CheckpointError(f"{where}: confidence_head_with_markov is true, but markov_rank is 0: there is no Markov embedding to read")
    return block_from_json(own, layers, where) | {
        "markov_rank": own.markov_rank,
        "markov_head": own.markov_head_type,
        "confidence_head": own.enable_confidence_head,
        "confidence_with_markov": own.confidence_head_with_markov,
    }


def check_headless(config: DraftConfig) -> None:
    """Refuse heads on an algorithm without them.

    Raises:
        CheckpointError: names the fields.
    """
    if config.markov_rank or config.confidence_head:
        raise CheckpointError(
            f"a {config.algorithm} drafter has no heads, but markov_rank={config.markov_rank} and confidence_head={config.confidence_head}",
            mend="set drafter.algorithm=dspark, or markov_rank=0 and confidence_head=false",
        )


def check_heads(config: DraftConfig) -> None:
    """Refuse an unknown Markov head.

    Raises:
        CheckpointError: names it.
    """
    if config.markov_rank and config.markov_head not in MARKOV_KINDS:
        raise CheckpointError(f"markov_head {config.markov_head!r} is unknown; known are {', '.join(MARKOV_KINDS)}", mend="set drafter.markov_head")


def block_limits(config: DraftConfig) -> list[str]:
    """What engines do not serve of a block drafter."""
    found = []
    reason = block_unserved(config)
    if reason is not None:
        found.append(f"{reason} Firesteel's own engine decodes it.")
    if _mixed(config):
        found.append("Its layers mix sliding and full attention, which vLLM serves with its V2 model runner only.")
    return found


def needs_second_runner(config: DraftConfig) -> bool:
    """Whether vLLM serves it with its V2 model runner only: all but a DFlash whose layers are of one kind."""
    return config.algorithm != "dflash" or _mixed(config)


def _mixed(config: DraftConfig) -> bool:
    return SLIDING in config.layer_types and FULL in config.layer_types


def block_unserved(config: DraftConfig) -> str | None:
    """Why vLLM cannot serve a block drafter, or None."""
    if config.markov_rank and config.markov_head != "vanilla":
        return f"vLLM serves the `vanilla` Markov head; this drafter has `{config.markov_head}`."
    if config.algorithm == "dspark" and not config.markov_rank:
        return "vLLM 0.32 needs a Markov head in a DSpark drafter (without one its process ends by a division by zero); this one has none."
    if config.algorithm in ("dflash", "dflash2") and config.sample_from_anchor:
        return "vLLM refuses a DFlash drafter that samples from the anchor slot, as this one does."
    return None


def sees_markov(config: DraftConfig) -> bool:
    """Whether the confidence head reads the Markov embedding of the predecessor; without a Markov head there is none to read."""
    return config.confidence_with_markov and config.markov_rank > 0


def _causal(own: BlockFields, layers: LayerFields, types: tuple[str, ...], where: str) -> bool:
    """Whether slots see only earlier slots. Without `is_causal`, sliding layers are causal unless `sliding_window_non_causal`, full ones never."""
    stated, sliding = layers.is_causal, not own.sliding_window_non_causal
    if SLIDING not in types:
        return bool(stated)
    if stated is not None and stated != sliding:
        raise CheckpointError(f"{where}: transformer_layer_config.is_causal is {stated}, sliding_window_non_causal is {not sliding}")
    if stated is None and sliding and FULL in types:
        raise CheckpointError(f"{where}: sliding layers are causal and full ones are not; Firesteel's drafters are one or the other in all layers")
    return sliding


def _head_keys(config: DraftConfig) -> dict[str, Key]:
    h, r, keys = config.hidden_size, config.markov_rank, {}
    if r:
        # W1 is read with target ids (the predecessor), W2 emits draft ids.
        keys["markov_head.markov_w1.weight"] = Key((config.vocab_size, r))
        keys["markov_head.markov_w2.weight"] = Key((config.draft_vocab_size, r))
        if config.markov_head == "gated":
            keys |= {"markov_head.gate_proj.weight": Key((r, h + r)), "markov_head.gate_proj.bias": Key((r,))}
        elif config.markov_head == "rnn":
            keys |= {"markov_head.joint_proj.weight": Key((3 * r, 2 * r + h)), "markov_head.joint_proj.bias": Key((3 * r,))}
    if config.confidence_head:
        # One row of full precision: it costs nothing, and its sigmoid is what calibration sharpens.
        width = h + r if sees_markov(config) else h
        keys |= {"confidence_head.proj.weight": Key((1, width), "float32"), "confidence_head.proj.bias": Key((1,), "float32")}
    return keys
