"""Sizes of a target and a drafter: all that the planner knows of models. Read from config.json or a table of public figures, never from weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from firesteel.errors import TargetError

TABLE = Path(__file__).parent / "targets.yaml"
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}


@dataclass(frozen=True)
class TargetShape:
    """A target in numbers.

    Attributes:
        parameters, active: all, and those that a token of a document is multiplied with (no embedding; no LM head, which only the one generated token meets).
        weight_bytes: that a server holds.
        precision: of its products: fp4, fp8, bf16 or fp32.
        attention_layers, attention_flops: layers whose cost grows with the text; FLOP a token and context token of one.
        cache_bytes: of one token, all layers.
        experts: whether it is a mixture.
        heads, kv_heads, head_dim, intermediate: what a drafter takes over where the recipe leaves it empty.
        source: where the numbers come from, for people.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    parameters: float
    active: float
    weight_bytes: float
    precision: str
    attention_layers: int
    attention_flops: float
    cache_bytes: float
    experts: bool
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    source: str


@dataclass(frozen=True)
class DrafterShape:
    """A drafter in numbers of parameters, by how often a step multiplies with them.

    Attributes:
        slot: once a slot (queries, outputs, MLPs).
        shared: once a slot and once a context token (keys and values).
        context: once a context token, whose input needs no gradient (`fc`).
        vocab_rank: width of the trained products over the vocabulary (Markov head).
        trained: all trained parameters, tables included.
        head: `vocab x hidden` of the frozen LM head, which draft and teacher are multiplied with.
        layers, attention_width: decoder layers, and heads x width of a head.
        window: context tokens that a slot sees at most; None: all.
        block: slots of a block.
        captured: layers of the target that it reads.
    """

    slot: float
    shared: float
    context: float
    vocab_rank: int
    trained: float
    vocab: int
    hidden: int
    layers: int
    attention_width: float
    window: int | None
    block: int
    captured: int

    @property
    def head(self) -> float:
        return float(self.vocab * self.hidden)


def known_target(model: str) -> TargetShape | None:
    """The entry of the table for a folder or hub name that ends in a known name."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    for row in yaml.safe_load(TABLE.read_text()).values():
        if last in row["names"]:
            numbers = {k: v for k, v in row.items() if k not in ("names", "attention")}
            return TargetShape(
                name=last,
                **numbers,
                attention_layers=row["attention"]["layers"],
                attention_flops=row["attention"]["flops"],
                source="public figures (firesteel/cluster/targets.yaml)",
            )
    return None


def read_target(path: str, dtype: str) -> TargetShape:
    """The shape of a target from the config.json in its folder; sizes of its files are looked up, never what is in them.

    Args:
        path: a folder, or a name that the table knows.
        dtype: `target.dtype`, in which unquantised weights are held.

    Raises:
        TargetError: neither a config.json nor an entry of the table.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        known = known_target(path)
        if known is not None:
            return known
        raise TargetError(f"target.model={path} has no config.json to plan with", mend="give the folder of the model; its weights need not be there")
    try:
        return shape_of(text_config(path), Path(path).name, dtype, _file_bytes(Path(path)))
    except (ValueError, KeyError, TypeError) as e:
        raise TargetError(f"{file} lacks what a plan needs: {e}", mend="give the folder of a causal language model") from e


def text_config(path: str) -> dict[str, Any]:
    """config.json of a folder, that of its language model over the whole; empty where there is none."""
    file = Path(path) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    return {**config, **(config.get("text_config") or {})}


def shape_of(config: Mapping[str, Any], name: str, dtype: str, file_bytes: float | None = None) -> TargetShape:
    """Count a decoder's parameters from its config: dense or a mixture, grouped or latent attention.

    Raises:
        KeyError: hidden_size, num_hidden_layers, num_attention_heads or vocab_size are missing.
    """
    d, layers, heads, vocab = (int(config[k]) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"))
    attention, flops, cached = _attention(config, d, heads)
    experts = int(_first(config, "num_experts", "n_routed_experts", "num_local_experts") or 0)
    dense_mlp = 3.0 * d * int(config.get("intermediate_size") or 4 * d)
    if experts:
        width = int(_first(config, "moe_intermediate_size", "intermediate_size") or 4 * d)
        # A latent mixture works in a narrower stream, between two projections.
        inner = int(config.get("routed_expert_hidden_size") or d)
        projections = 2.0 * d * inner if inner != d else 0.0
        shared = (
            3.0 * d * (int(_first(config, "n_shared_experts", "num_shared_experts") or 0) * width + int(config.get("shared_expert_intermediate_size") or 0))
        )
        per_token = int(_first(config, "num_experts_per_tok", "num_experts_per_token", "top_k_experts") or 1)
        first_dense = int(config.get("first_k_dense_replace") or 0)
        mixture = layers - first_dense
        one = 3.0 * inner * width
        total = layers * attention + first_dense * dense_mlp + mixture * (experts * one + shared + projections + d * experts)
        active = layers * attention + first_dense * dense_mlp + mixture * (per_token * one + shared + projections + d * experts)
    else:
        total = active = layers * (attention + dense_mlp)
    tables = vocab * d * (1 if config.get("tie_word_embeddings") else 2)
    precision, width_bytes = _weights(config, dtype)
    return TargetShape(
        name=name,
        layers=layers,
        hidden=d,
        vocab=vocab,
        parameters=total + tables,
        active=active,
        # What a server holds, not what lies on disk, where the two differ in precision.
        weight_bytes=file_bytes if file_bytes is not None and "quantization_config" in config else (total + tables) * width_bytes,
        precision=precision,
        attention_layers=layers,
        attention_flops=flops,
        cache_bytes=layers * cached * 2.0,
        experts=bool(experts),
        heads=heads,
        # As in `target/spec.py`: latent attention has no groups of key heads, so 16 are made; a head is as wide as the rotary part.
        kv_heads=math.gcd(heads, 16) if config.get("kv_lora_rank") else int(config.get("num_key_value_heads") or heads),
        head_dim=int((config.get("qk_rope_head_dim") if config.get("kv_lora_rank") else config.get("head_dim")) or d // heads),
        intermediate=int(_first(config, "intermediate_size", "moe_intermediate_size") or 4 * d),
        max_positions=int(config.get("max_position_embeddings") or 4096),
        source="config.json",
    )


def _attention(config: Mapping[str, Any], d: int, heads: int) -> tuple[float, float, float]:
    """(parameters, FLOP a token and context token, cached values a token) of a layer."""
    if config.get("kv_lora_rank"):
        q, kv = int(config.get("q_lora_rank") or 0), int(config["kv_lora_rank"])
        nope, rope, v = int(config.get("qk_nope_head_dim") or 0), int(config.get("qk_rope_head_dim") or 0), int(config.get("v_head_dim") or 0)
        queries = d * q + q * heads * (nope + rope) if q else d * heads * (nope + rope)
        return float(queries + d * (kv + rope) + kv * heads * (nope + v) + heads * v * d), 2.0 * heads * (nope + rope + v), float(kv + rope)
    width = int(config.get("head_dim") or d // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2.0 * d * width * (heads + kv_heads), 4.0 * heads * width, 2.0 * kv_heads * width


def _weights(config: Mapping[str, Any], dtype: str) -> tuple[str, float]:
    """(precision of the products, bytes of a parameter)."""
    quant = config.get("quantization_config")
    if not quant:
        return _PRECISION[dtype], _BYTES[dtype]
    method = str(quant.get("quant_method", ""))
    if method == "fp8":
        return "fp8", 1.0
    if method in ("mxfp4", "nvfp4"):
        return "fp4", 4.25 / 8  # one 8-bit scale for 32 values
    groups = list((quant.get("config_groups") or {}).values())
    bits = float(quant.get("bits") or (groups[0].get("weights") or {}).get("num_bits", 8) if groups or quant.get("bits") else 8)
    activations = (groups[0].get("input_activations") or {}).get("num_bits") if groups else None
    # Weights alone in few bits are multiplied in 16.
    return ("fp8" if activations == 8 else "fp4" if activations == 4 else "bf16"), bits / 8 * 1.06


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[n] for n in names if config.get(n)), None)


def _file_bytes(folder: Path) -> float | None:
    sizes = [p.stat().st_size for p in folder.glob("*.safetensors")]
    return float(sum(sizes)) if sum(sizes) > 0 else None
