"""Checkpoints of MTP heads: the target's own tensor names below `mtp.`, its final norm beside them, and a config.json that holds its layer.

No server opens such a folder: they load the head with the target (`package.stitch` puts it there).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.keys import Key
from firesteel.drafters.layer_json import LayerFields, ReadStrictly
from firesteel.drafters.rope import rope_kind
from firesteel.drafters.target_layer import check_layer, make_layer
from firesteel.errors import CheckpointError, RecipeError, TargetError

MODEL_TYPE: Literal["mtp_head"] = "mtp_head"
PREFIX = "mtp."
TARGET_NORM = "target_norm.weight"
# What a configuration says beside the layers: names, outputs, storage.
_BESIDE = re.compile(r"_.*|output_.*|.*_token_id|architectures|transformers_version|.*dtype|id2label|label2id|problem_type|return_dict|use_cache")
_FOREIGN = ("quantization_config", "chunk_size_feed_forward", "is_encoder_decoder", "tie_word_embeddings")
_EXPERT = re.compile(r"^(?P<block>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight$")


class MtpFields(ReadStrictly):
    """config.json of an MTP head."""

    model_type: Literal["mtp_head"]
    text_config: dict[str, Any]
    vocab_size: int
    block_size: int
    layer_ids: tuple[int, ...]
    num_speculative_tokens: int


def mtp_options(settings: recipes.Drafter) -> dict[str, Any]:
    """The recipe's `drafter.mtp` as a config holds it; `norm_output` is how the next step is fed."""
    return {"beta": settings.mtp.beta, "norm_output": True}


def mtp_decay(config: DraftConfig) -> float:
    """Exponential weights exp(-k / decay) that are beta^k (FastMTP, equation 2; the loss divides by their sum)."""
    beta = float(config.extra["beta"])
    return math.inf if beta == 1 else -1.0 / math.log(beta)


def last_layer(num_layers: int) -> tuple[int, ...]:
    """What `target.layer_ids=auto` captures: the state after the last layer."""
    return (num_layers,)


def mtp_limits(config: DraftConfig) -> list[str]:
    """What a user must know before serving."""
    return ["It is served from a copy of its target (`firesteel stitch`), rounded to the precision of the head that it replaces; it was measured in float32."]


def fits_mtp(settings: recipes.Drafter, layer: Mapping[str, Any], native: Callable[[], Mapping[str, Tensor]]) -> None:
    """Refuse a target of a class without MTP heads, and a start that it does not have.

    Raises:
        RecipeError: names the setting.
    """
    try:
        check_layer(layer)
    except CheckpointError as e:
        raise RecipeError(f"drafter.algorithm=mtp: {e.message}", mend=e.mend) from None
    if settings.init == "target":
        raise RecipeError("drafter.init=target: an MTP head begins with the target's native one", mend="leave out drafter.init, and set drafter.mtp.start")
    if settings.mtp.start == "native" and settings.init == "random" and not native():
        raise _headless()


def adapt_to_target(config: DraftConfig, layer: Mapping[str, Any], num_layers: int) -> DraftConfig:
    """The head of a target: all its sizes are the target's, whatever the recipe says.

    Args:
        layer: the target's text configuration, as Transformers writes it.

    Raises:
        RecipeError: the target's last state is not captured.
    """
    if config.layer_ids[-1] != num_layers:
        raise RecipeError(f"target.layer_ids={list(config.layer_ids)} lacks the target's last state, which an MTP head reads", mend=f"end it with {num_layers}")
    plain = plain_layer(layer)
    return replace(config, **_values(plain), extra={**config.extra, "layer": plain})


def plain_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """What shapes one layer with full attention, of a target's text configuration as Transformers writes it."""
    kept = {k: v for k, v in layer.items() if not _BESIDE.fullmatch(k) and k not in _FOREIGN}
    rope = kept.get("rope_parameters") or {}
    kept = {k: v for k, v in kept.items() if k not in rope}  # older places of the same values
    kept |= {"num_hidden_layers": 1, "layer_types": [FULL]}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def check_mtp(config: DraftConfig) -> None:
    """Refuse what an MTP head does not have.

    Raises:
        CheckpointError: names the field.
    """
    layer = config.extra.get("layer")
    if not isinstance(layer, dict):
        raise CheckpointError("an mtp drafter's configuration holds no layer of a target")
    check_layer(layer)
    for name, value in _values(layer).items():
        if getattr(config, name) != value:
            raise CheckpointError(f"{name} is {getattr(config, name)!r} in an mtp drafter's configuration, {value!r} in its target's layer")
    if config.hidden_size != config.target_hidden_size:
        raise CheckpointError(f"an MTP head of width {config.hidden_size} belongs to no target of width {config.target_hidden_size}")
    if config.markov_rank or config.confidence_head or not config.sample_from_anchor or not config.causal or config.mask_token_id is not None:
        raise CheckpointError("an MTP head has neither Markov nor confidence head nor masks, and drafts causally from the anchor on")


def mtp_keys(config: DraftConfig) -> dict[str, Key]:
    """The drafter's state dict: `mtp.*`, and the final norm of the target (what it multiplies by)."""
    h = config.hidden_size
    own = {"fc.weight": (h, 2 * h), "pre_fc_norm_embedding.weight": (h,), "pre_fc_norm_hidden.weight": (h,), "norm.weight": (h,)}
    own |= {f"layers.0.{name}": shape for name, shape in _layer_shapes(json.dumps(config.extra["layer"], sort_keys=True)).items()}
    return {f"{PREFIX}{name}": Key(shape) for name, shape in own.items()} | {TARGET_NORM: Key((h,), "float32")}


def mtp_layer_json(config: DraftConfig) -> dict[str, Any]:
    """What shapes the network."""
    return {"text_config": config.extra["layer"]}


def mtp_from_frame(own: MtpFields, layers: LayerFields, where: str) -> dict[str, Any]:
    """An MTP head in the frame of other drafters has no place for its target's final norm.

    Raises:
        CheckpointError: always; `package.convert.mtp` reads such a file together with its target.
    """
    raise CheckpointError(f"{where}: an MTP head in this layout leaves out its target's final norm")


def mtp_to_json(config: DraftConfig, *, dtype: str, speculative_tokens: int, target_layers: int) -> dict[str, Any]:
    """The whole of config.json."""
    return {
        "architectures": ["MTPHead"],
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        "block_size": config.block_size,
        "num_speculative_tokens": speculative_tokens,
        "vocab_size": config.vocab_size,
        "layer_ids": list(config.layer_ids),
        "text_config": config.extra["layer"],
    }


def mtp_from_json(own: MtpFields, where: str) -> dict[str, Any]:
    """Values of `DraftConfig` from config.json.

    Raises:
        CheckpointError: no layer that is known.
    """
    try:
        check_layer(own.text_config)
        sizes = _values(own.text_config)
    except (KeyError, TypeError) as e:
        raise CheckpointError(f"{where}: text_config lacks {e}", mend="export the drafter again") from None
    return sizes | {
        "algorithm": "mtp",
        "vocab_size": own.vocab_size,
        "draft_vocab_size": own.vocab_size,
        "target_hidden_size": sizes["hidden_size"],
        "layer_ids": own.layer_ids,
        "block_size": own.block_size,
        "mask_token_id": None,
        "sample_from_anchor": True,
        "causal": True,
        "extra": {"layer": own.text_config, "norm_output": True},
    }


# -- the layout of the target's files -----------------------------------------------------------------------------------


def from_native(tensors: Mapping[str, Tensor], keys: Mapping[str, Key]) -> dict[str, Tensor]:
    """Tensors of the target's files, by their names there -> the trained part of a drafter's state dict, in float32.

    Experts may be stored one by one, or as the class has them.

    Raises:
        TargetError: a tensor is missing, unknown, quantised or of another shape.
    """
    mend = "set drafter.mtp.start=random, or give a target whose head is whole and not quantised"
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TargetError(f"the target's native MTP head holds {name} as {tensor.dtype}", mend=mend)
        if match is None:
            found[name] = tensor.float()
        else:
            experts.setdefault(match["block"], {})[int(match["number"]), match["part"]] = tensor.float()
    for block, parts in experts.items():
        numbers = range(max(n for n, _ in parts) + 1)
        lacking = [f"{block}.{n}.{part}_proj.weight" for n in numbers for part in ("gate", "up", "down") if (n, part) not in parts]
        if lacking:
            raise TargetError(f"the target's native MTP head lacks {lacking[0]}", mend=mend)
        found[f"{block}.gate_up_proj"] = torch.stack([torch.cat([parts[n, "gate"], parts[n, "up"]]) for n in numbers])
        found[f"{block}.down_proj"] = torch.stack([parts[n, "down"] for n in numbers])
    wanted = {name: key for name, key in keys.items() if name.startswith(PREFIX)}
    for name in sorted(wanted.keys() ^ found.keys()):
        raise TargetError(f"the target's native MTP head {'lacks' if name in wanted else 'holds unknown'} {name}", mend=mend)
    for name, key in wanted.items():
        if tuple(found[name].shape) != key.shape:
            raise TargetError(f"the target's native MTP head: {name} is {list(found[name].shape)}, its config.json gives {list(key.shape)}", mend=mend)
    return found


def native_tensor(name: str, state: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """What a tensor of the target's files is called in a drafter's state dict, and its value from there; None where it has none."""
    if name in state:
        return name, state[name]
    match = _EXPERT.match(name)
    whole = None if match is None else f"{match['block']}.{'down' if match['part'] == 'down' else 'gate_up'}_proj"
    if match is None or whole is None or whole not in state or int(match["number"]) >= state[whole].shape[0]:
        return None
    expert = state[whole][int(match["number"])]
    return whole, expert if match["part"] == "down" else expert.chunk(2)[match["part"] == "up"]


def native_names(state: Mapping[str, Tensor]) -> list[str]:
    """Names under which a target's files hold a head: experts one by one, which every server reads."""
    names: list[str] = []
    for name, tensor in state.items():
        if not name.startswith(PREFIX):
            continue
        block, _, part = name.rpartition(".")
        if block.endswith(".experts"):
            parts = ("gate", "up") if part == "gate_up_proj" else ("down",)
            names += [f"{block}.{n}.{p}_proj.weight" for n in range(tensor.shape[0]) for p in parts]
        else:
            names.append(name)
    return names


@torch.no_grad()
def start_mtp(drafter: nn.Module, settings: recipes.Drafter, final_norm: Tensor, native: Mapping[str, Tensor]) -> str:
    """Give a new drafter the target's final norm, and its head where the recipe and the target's files have it; says which.

    Args:
        final_norm: `[h]` what the target's final norm multiplies by.
        native: tensors of the target's files below `mtp.`; empty where there are none.

    Raises:
        RecipeError: `drafter.mtp.start=native`, but the files hold no head.
        TargetError: the head in the files is damaged or quantised.
    """
    state = drafter.state_dict()
    state[TARGET_NORM].copy_(final_norm)
    if settings.init not in ("random", "target"):  # a drafter to compare with may be told `target`; its head has a setting of its own
        return f"the head begins as that of {settings.init}"
    if settings.mtp.start == "native" and not native:
        raise _headless()
    if settings.mtp.start == "random" or not native:
        return "the head begins from noise" + ("" if native else ": the target's files hold no mtp.* tensors")
    config: Any = drafter.config
    for name, tensor in from_native(native, mtp_keys(config)).items():
        state[name].copy_(tensor)
    return f"the head begins as the target's native one ({len(native)} tensors)"


def _headless() -> RecipeError:
    return RecipeError(
        "drafter.mtp.start=native, but the target's files hold no mtp.* tensors (saving a model with Transformers drops them)",
        mend="give the publisher's folder as target.model, or set drafter.mtp.start=random",
    )


@lru_cache(maxsize=8)
def _layer_shapes(layer: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in make_layer(json.loads(layer))[0].state_dict().items()}


def _values(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `DraftConfig` that a target's layer gives."""
    rope = dict(layer.get("rope_parameters") or {})
    heads, hidden = int(layer["num_attention_heads"]), int(layer["hidden_size"])
    kind = rope_kind(rope)
    return {
        "hidden_size": hidden,
        "intermediate_size": int(layer.get("intermediate_size") or layer["moe_intermediate_size"]),
        "num_layers": 1,
        "num_heads": heads,
        "num_kv_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": int(layer.get("head_dim") or hidden // heads),
        "layer_types": (FULL,),
        "rms_norm_eps": float(layer["rms_norm_eps"]),
        "rope_theta": float(rope.pop("rope_theta", 10000.0)),
        "rope_scaling": None if kind == "default" else rope,
        "max_position_embeddings": int(layer["max_position_embeddings"]),
        "hidden_act": str(layer.get("hidden_act", "silu")),
    }
