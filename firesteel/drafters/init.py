"""How a drafter starts: from noise, or from the target's own layers.

From the target, layer i of the drafter is layer L + i of the target, where L is the last captured layer (or as far before the end as
the drafter has layers). `fc` hands the captured input of layer L through and `hidden_norm` is that layer's own input norm, so the keys and
values of the context are, up to norms that the target may not have, those that the target itself has there. Against a random
start the same number of steps reaches more (docs/learning-log.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from firesteel.errors import RecipeError

_STD = 0.02
_CALM = 0.3
_COPIED = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
_KEYS_VALUES = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
_COPIED_IF_THERE = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


@torch.no_grad()
def init_random(drafter: nn.Module) -> None:
    """Matrices and W1 from normal(0, 0.02); norms are 1 and biases 0.

    W2 is zero, so that a new DSpark is a DFlash and learns its bias from there (W1 gets a gradient as soon as W2 has moved).
    The confidence head is zero: every confidence starts at 1/2, the middle of its logit.
    """
    for name, parameter in drafter.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith("markov_w2.weight") or name.startswith("confidence_head"):
            parameter.zero_()
        else:
            nn.init.normal_(parameter, std=_STD)


@torch.no_grad()
def init_from_target(drafter: nn.Module, layers: Sequence[Mapping[str, Tensor]], final_norm: Tensor | None = None, *, feature: int | None = None) -> None:
    """Copy decoder layers of the target, and its final norm, into the drafter.

    A drafter with as many query heads as the target and a multiple of its key/value heads gets each of those several times: the same function.
    A target without q/k norms leaves the drafter's at 1; biases of the target's projections have no counterpart and are left out.

    Args:
        layers: state dict of `num_layers` consecutive layers of the target, in order, with the names of Llama and Qwen.
        final_norm: `[h]` weight of the norm before the LM head; the drafter's starts at `_CALM` times it. Where embedding and head are tied,
            a block's first state still looks like the anchor's own embedding, and at full scale all probability would go to repeating it.
        feature: which of the captured states (by number) is the first copied layer's input; None leaves the context's way random.

    Raises:
        RecipeError: the target has too few layers, other names, or other shapes than the recipe gives the drafter.
    """
    mend = "set drafter.init=random, or take the target's sizes (drafter.intermediate_size, num_heads, num_kv_heads, head_dim empty)"
    own = dict(drafter.named_parameters())
    count = len({name.split(".")[1] for name in own if name.startswith("layers.")})
    if not {"fc.weight", "norm.weight"} <= own.keys() or not count:
        raise RecipeError("drafter.init=target: this drafter has no layers that a target's could be copied into", mend="set drafter.init=random")
    if len(layers) != count:
        raise RecipeError(f"drafter.init=target: {len(layers)} target layers for drafter.num_layers={count}", mend="lower drafter.num_layers")
    head_dim = int(cast(Any, drafter.config).head_dim)
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for number, source in enumerate(layers):
        missing = [name for name in _COPIED if name not in source]
        if missing:
            raise RecipeError(f"drafter.init=target: the target's layers have no {missing[0]}", mend="set drafter.init=random")
        foreign = [name for name in source if name not in (*_COPIED, *_COPIED_IF_THERE) and not name.endswith("_proj.bias")]
        if foreign:
            raise RecipeError(f"drafter.init=target: a drafter's layers have no {foreign[0]}, the target's do", mend="set drafter.init=random")
        for name in (n for n in (*_COPIED, *_COPIED_IF_THERE) if n in source):
            full = f"layers.{number}.{name}"
            if full not in own:
                raise RecipeError(
                    f"drafter.init=target: the target's layers have {name}, the drafter's do not",
                    mend="set drafter.eagle.layer_style=qwen3, or drafter.init=random",
                )
            value = source[name]
            if name in _KEYS_VALUES:
                value = _for_more_heads(value, own[full].shape[0], source["self_attn.q_proj.weight"].shape[0], head_dim)
            pairs.append((full, own[full], _beside_embedding(own[full], value)))
    if final_norm is not None:
        pairs.append(("norm.weight", own["norm.weight"], _CALM * final_norm))
    if feature is not None:
        name = "hidden_norm.weight" if "hidden_norm.weight" in own else "layers.0.hidden_norm.weight"
        pairs.append((name, own[name], layers[0]["input_layernorm.weight"]))
    for name, parameter, value in pairs:  # all shapes first: a refused drafter is left as it was
        if parameter.shape != value.shape:
            raise RecipeError(f"drafter.init=target: {name} is {list(parameter.shape)} in the drafter and {list(value.shape)} in the target", mend=mend)
    for _, parameter, value in pairs:
        parameter.copy_(value)
    if feature is not None:
        fc = own["fc.weight"]  # the other captured states start with what little weight noise has
        width = fc.shape[0]
        fc[:, feature * width : (feature + 1) * width] = torch.eye(width)


def _beside_embedding(parameter: Tensor, value: Tensor) -> Tensor:
    """A projection of the target as the drafter has it: an EAGLE layer reads `[embedding ; state]`, the target's reads the state."""
    if parameter.ndim == 2 and parameter.shape == (value.shape[0], 2 * value.shape[1]):
        return torch.cat([torch.zeros_like(value), value], dim=1)
    return value


def _for_more_heads(value: Tensor, rows: int, query_rows: int, head_dim: int) -> Tensor:
    """Keys' or values' projection `[Hkv * D, h]` with each head repeated until there are `rows`; as it is where that is no whole number of times."""
    if rows <= value.shape[0] or rows % value.shape[0] or query_rows % rows or value.shape[0] % head_dim:
        return value
    return value.unflatten(0, (-1, head_dim)).repeat_interleave(rows // value.shape[0], dim=0).flatten(0, 1)
