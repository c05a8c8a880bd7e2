"""config.json in the speculators format, which vLLM opens: writing it, and reading it strictly.

Where readers of the format disagree about an absent or doubtful field, writing states it and reading refuses it:
a drafter served by another rule than it was trained by loses its acceptance without an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.errors import CheckpointError, FiresteelError
from firesteel.package.contract import Contract, window_of
from firesteel.package.keys import ALGORITHMS, check_algorithm, sees_markov

FORMAT_VERSION = "0.9.0"
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Described:
    """What config.json says.

    Attributes:
        dtype: precision of the weights, or None if the file is silent.
        speculative_tokens: tokens to draft per round.
        verifier: the target's name, or None.
    """

    config: DraftConfig
    dtype: torch.dtype | None
    speculative_tokens: int
    verifier: str | None


def to_speculators(config: DraftConfig, contract: Contract, dtype: torch.dtype) -> dict[str, Any]:
    """The whole of config.json for a drafter.

    `is_causal` is written where a reader would otherwise guess: sliding layers count as causal in vLLM. A `pypi:` name of
    the target means nothing to other readers, so the verifier then has no name.

    Raises:
        CheckpointError: a precision or a scaling of RoPE that the file cannot express.
    """
    if config.rope_scaling is not None and config.rope_scaling.get("rope_type", "default") == "default":
        raise CheckpointError(f"rope_scaling {config.rope_scaling} names no rope_type: other readers would not scale")
    name = dtype_name(dtype)
    slides = SLIDING in config.layer_types
    layers: dict[str, Any] = {
        "model_type": "qwen3",
        "dtype": name,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
        "layer_types": list(config.layer_types),
        "use_sliding_window": slides,
        "sliding_window": window_of(config),
        "max_window_layers": 0 if slides else config.num_layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }
    if slides or config.causal:
        layers["is_causal"] = config.causal
    data: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.algorithm]],
        "speculators_model_type": config.algorithm,
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": config.algorithm,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": contract.speculative_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": None if contract.target_name.startswith("pypi:") else contract.target_name,
                "architectures": [contract.target_architecture],
            },
        },
        "transformer_layer_config": layers,
        "dtype": name,
        "aux_hidden_state_layer_ids": list(config.layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.causal,
    }
    if config.algorithm == "dspark":
        data |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": sees_markov(config),
        }
    return data


def from_speculators(data: dict[str, Any], *, where: str) -> Described:
    """Read config.json.

    Args:
        where: the file; begins each error.

    Raises:
        CheckpointError: an unknown algorithm, a field that is missing, of the wrong type or without a meaning here, or a contradiction.
    """
    kind = data.get("speculators_model_type")
    if kind not in ALGORITHMS:
        raise CheckpointError(
            f"{where}: speculators_model_type is {kind!r}; known are {', '.join(ALGORITHMS)}",
            mend="the file must be a speculators checkpoint of a known algorithm",
        )
    text = json.dumps(data)
    try:
        top = _DSpark.model_validate_json(text) if kind == "dspark" else _DFlash.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        field = ".".join(str(p) for p in first["loc"])
        value = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        raise CheckpointError(f"{where}: {field}: {first['msg']}{value}", mend="state the field as the drafter was trained") from None
    layers, spec = top.transformer_layer_config, top.speculators_config
    if spec.algorithm != kind:
        raise CheckpointError(f"{where}: speculators_model_type is {kind!r}, speculators_config.algorithm is {spec.algorithm!r}")
    if isinstance(top, _DSpark) and top.enable_confidence_head and top.confidence_head_with_markov and not top.markov_rank:
        raise CheckpointError(f"{where}: confidence_head_with_markov is true, but markov_rank is 0: there is no Markov embedding to read")
    types = _layer_types(layers, where)
    window = _window(layers, types, where)
    theta, scaling = _rope(layers, where)
    heads = top if isinstance(top, _DSpark) else None
    try:
        config = DraftConfig(
            algorithm=kind,
            hidden_size=layers.hidden_size,
            intermediate_size=layers.intermediate_size,
            num_layers=layers.num_hidden_layers,
            num_heads=layers.num_attention_heads,
            num_kv_heads=layers.num_key_value_heads,
            head_dim=layers.head_dim,
            vocab_size=layers.vocab_size,
            draft_vocab_size=top.draft_vocab_size,
            target_hidden_size=top.target_hidden_size or layers.hidden_size,
            layer_ids=top.aux_hidden_state_layer_ids,
            block_size=top.block_size,
            mask_token_id=top.mask_token_id,
            sample_from_anchor=top.sample_from_anchor,
            layer_types=types,
            sliding_window=DraftConfig.sliding_window if window is None else window,
            causal=_causal(top, types, where),
            rms_norm_eps=layers.rms_norm_eps,
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=layers.max_position_embeddings,
            hidden_act=layers.hidden_act,
            markov_rank=heads.markov_rank if heads else 0,
            markov_head=heads.markov_head_type if heads else DraftConfig.markov_head,
            confidence_head=heads is not None and heads.enable_confidence_head,
            confidence_with_markov=heads.confidence_head_with_markov if heads else DraftConfig.confidence_with_markov,
        )
        check_algorithm(config)
    except FiresteelError as e:
        raise CheckpointError(f"{where}: {e.message}") from None
    tokens = spec.proposal_methods[0].speculative_tokens
    if not 1 <= tokens <= config.num_drafts:
        raise CheckpointError(f"{where}: speculative_tokens is {tokens}, but a block of {config.block_size} slots drafts {config.num_drafts} tokens")
    dtype = data.get("dtype") or data.get("torch_dtype")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype is {dtype!r}; known are {', '.join(DTYPES)}", mend="quantised drafters are not read")
    return Described(config, None if dtype is None else DTYPES[dtype], tokens, spec.verifier.name_or_path)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`.

    Raises:
        CheckpointError: a precision that checkpoints do not come in.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise CheckpointError(f"a checkpoint cannot have dtype {dtype}; known are {', '.join(DTYPES)}")


def _layer_types(layers: _Layers, where: str) -> tuple[str, ...]:
    types = layers.layer_types
    if types is None:
        if layers.use_sliding_window:
            raise CheckpointError(f"{where}: use_sliding_window is true, but layer_types does not say which layers slide", mend="state layer_types")
        return (FULL,) * layers.num_hidden_layers
    if len(types) != layers.num_hidden_layers:
        raise CheckpointError(f"{where}: layer_types names {len(types)} layers, num_hidden_layers is {layers.num_hidden_layers}")
    return types


def _window(layers: _Layers, types: tuple[str, ...], where: str) -> int | None:
    """The window of the sliding layers; Qwen3's own configuration forgets it unless `use_sliding_window` is true."""
    if SLIDING not in types:
        return None
    if layers.sliding_window is None or (layers.model_type == "qwen3" and not layers.use_sliding_window):
        raise CheckpointError(
            f"{where}: layer_types has sliding layers, but sliding_window is {layers.sliding_window} and use_sliding_window is {layers.use_sliding_window}",
            mend="state the window and set use_sliding_window",
        )
    return layers.sliding_window


def _causal(top: _DFlash, types: tuple[str, ...], where: str) -> bool:
    """Whether slots see only earlier slots. Without `is_causal`, sliding layers are causal unless `sliding_window_non_causal`, full ones never."""
    stated, sliding = top.transformer_layer_config.is_causal, not top.sliding_window_non_causal
    if SLIDING not in types:
        return bool(stated)
    if stated is not None and stated != sliding:
        raise CheckpointError(f"{where}: transformer_layer_config.is_causal is {stated}, sliding_window_non_causal is {not sliding}")
    if stated is None and sliding and FULL in types:
        raise CheckpointError(f"{where}: sliding layers are causal and full ones are not; Firesteel's drafters are one or the other in all layers")
    return sliding


def _rope(layers: _Layers, where: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling (None if there is none), from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    rope = dict(layers.rope_parameters or layers.rope_scaling or {})
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", layers.rope_theta)
    if not isinstance(theta, int | float) or isinstance(theta, bool):
        raise CheckpointError(f"{where}: rope_theta is {theta!r}, not a number", mend="state rope_parameters.rope_theta as the drafter was trained")
    if kind == "default" and len(rope) > 1:
        raise CheckpointError(f"{where}: rope_parameters has {', '.join(sorted(rope.keys() - {'rope_type'}))}: a drafter's positions are those of plain text")
    return float(theta), None if kind == "default" else rope


class _Read(BaseModel):
    """Fields that shape the drafter; what other tools add beside them is not looked at."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class _Layers(_Read):
    """`transformer_layer_config`. The fields with one allowed value would change the network if they had another."""

    model_type: Literal["qwen3", "llama"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    use_sliding_window: bool | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    is_neox_style: Literal[True] = True
    logit_scale: Literal[1] | None = None
    quantization_config: None = None


class _Proposal(_Read):
    speculative_tokens: int


class _Verifier(_Read):
    name_or_path: str | None


class _Algorithm(_Read):
    algorithm: str
    proposal_methods: tuple[_Proposal, ...] = Field(min_length=1)
    verifier: _Verifier


class _DFlash(_Read):
    """Top level of a dflash checkpoint."""

    speculators_config: _Algorithm
    transformer_layer_config: _Layers
    aux_hidden_state_layer_ids: tuple[int, ...] = Field(min_length=1)
    mask_token_id: int
    block_size: int
    draft_vocab_size: int
    target_hidden_size: int | None = None
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    quantization_config: None = None


class _DSpark(_DFlash):
    """Top level of a dspark checkpoint. `sample_from_anchor` must be there: absent, speculators takes it for true, vLLM for false."""

    sample_from_anchor: bool
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"]
    enable_confidence_head: bool
    confidence_head_with_markov: bool
