"""config.json in the speculators format, which vLLM opens: writing it, and reading it strictly.

The frame is common; what an algorithm adds is its own (`DraftSpec.schema`, `to_json`, `from_json`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, Field, ValidationError

from firesteel.drafters.config import DraftConfig
from firesteel.drafters.layer_json import LayerFields, ReadStrictly, layers_from_json, layers_to_json
from firesteel.drafters.registry import Native, get_spec, names, native_format
from firesteel.errors import CheckpointError, FiresteelError
from firesteel.package.contract import Contract
from firesteel.package.keys import check_algorithm

FORMAT_VERSION = "0.9.0"
_T = TypeVar("_T", bound=BaseModel)
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
    """The whole of config.json for a drafter, in its algorithm's own layout where that covers it.

    A `pypi:` name of the target means nothing to other readers, so the verifier then has no name.

    Raises:
        CheckpointError: a precision or a scaling of RoPE that the file cannot express.
    """
    spec, name = get_spec(config.algorithm), dtype_name(dtype)
    if spec.native is not None and spec.native.covers(config):
        return spec.native.to_json(config, dtype=name, speculative_tokens=contract.speculative_tokens, target_layers=contract.target_layers)
    own = dict(spec.to_json(config))
    return {
        "architectures": [spec.architecture],
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
        "transformer_layer_config": layers_to_json(config, name) | own.pop("transformer_layer_config", {}),
        "dtype": name,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
    } | own


def from_speculators(data: dict[str, Any], *, where: str) -> Described:
    """Read config.json.

    Args:
        where: the file; begins each error.

    Raises:
        CheckpointError: an unknown algorithm, a field that is missing, of the wrong type or without a meaning here, or a contradiction.
    """
    native = native_format(data.get("model_type"))
    if native is not None:
        return _from_native(native, data, where)
    kind = data.get("speculators_model_type")
    if kind not in names():
        raise CheckpointError(
            f"{where}: speculators_model_type is {kind!r}; known are {', '.join(names())}",
            mend="the file must be a speculators checkpoint of a known algorithm; one of your own is registered by drafter.module (generate: --module)",
        )
    spec = get_spec(kind)
    if spec.stitch:
        raise CheckpointError(
            f"{where}: {spec.title} in speculators' layout leaves out the final norm of its target, which every step needs",
            mend="firesteel convert FOLDER NEW_FOLDER --target TARGET takes it from there",
        )
    text = json.dumps(data)
    top, own = _read(_Top, text, where), _read(spec.schema, text, where)
    layers, frame = top.transformer_layer_config, top.speculators_config
    _check_kind(kind, frame.algorithm, where)
    values = layers_from_json(layers, where) | spec.from_json(own, layers, where)
    tokens = frame.proposal_methods[0].speculative_tokens
    # A chain of one token per step has no length of its own but the one it was trained for.
    values.setdefault("block_size", tokens)
    values |= {"algorithm": kind, "draft_vocab_size": top.draft_vocab_size, "target_hidden_size": top.target_hidden_size or layers.hidden_size}
    return _described(values, tokens, frame.verifier.name_or_path, data, where)


def read_frame(data: dict[str, Any], where: str) -> tuple[int, str | None]:
    """Tokens to draft per round and the target's name, or None: what the frame says of any drafter.

    Raises:
        CheckpointError: a field is missing or of the wrong type, or the algorithm is another than the file declares.
    """
    frame = _read(_Framed, json.dumps(data), where).speculators_config
    _check_kind(data.get("speculators_model_type"), frame.algorithm, where)
    return frame.proposal_methods[0].speculative_tokens, frame.verifier.name_or_path


def _check_kind(kind: object, algorithm: str, where: str) -> None:
    if algorithm != kind:
        raise CheckpointError(f"{where}: speculators_model_type is {kind!r}, speculators_config.algorithm is {algorithm!r}")


def _from_native(native: Native, data: dict[str, Any], where: str) -> Described:
    """A file without the frame: it names no target, and may leave the tokens to draft per round to the block."""
    values = native.from_json(_read(native.schema, json.dumps(data), where), where)
    return _described(values, data.get("num_speculative_tokens"), None, data, where)


def _described(values: dict[str, Any], tokens: int | None, verifier: str | None, data: dict[str, Any], where: str) -> Described:
    try:
        config = DraftConfig(**values)
        check_algorithm(config)
    except FiresteelError as e:
        raise CheckpointError(f"{where}: {e.message}") from None
    tokens = config.num_drafts if tokens is None else tokens
    if not 1 <= tokens <= config.num_drafts:
        raise CheckpointError(f"{where}: speculative_tokens is {tokens}, but a block of {config.block_size} slots drafts {config.num_drafts} tokens")
    dtype = data.get("dtype") or data.get("torch_dtype")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype is {dtype!r}; known are {', '.join(DTYPES)}", mend="quantised drafters are not read")
    return Described(config, None if dtype is None else DTYPES[dtype], tokens, verifier)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`.

    Raises:
        CheckpointError: a precision that checkpoints do not come in.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise CheckpointError(f"a checkpoint cannot have dtype {dtype}; known are {', '.join(DTYPES)}")


def _read(schema: type[_T], text: str, where: str) -> _T:
    try:
        return schema.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        field = ".".join(str(p) for p in first["loc"])
        value = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        raise CheckpointError(f"{where}: {field}: {first['msg']}{value}", mend="state the field as the drafter was trained") from None


class _Proposal(ReadStrictly):
    speculative_tokens: int


class _Verifier(ReadStrictly):
    name_or_path: str | None


class _Algorithm(ReadStrictly):
    algorithm: str
    proposal_methods: tuple[_Proposal, ...] = Field(min_length=1)
    verifier: _Verifier


class _Framed(ReadStrictly):
    """The frame alone."""

    speculators_config: _Algorithm


class _Top(_Framed):
    """What every checkpoint states."""

    transformer_layer_config: LayerFields
    draft_vocab_size: int
    target_hidden_size: int | None = None
    quantization_config: None = None
