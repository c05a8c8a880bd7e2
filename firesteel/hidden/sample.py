"""HiddenSample: the captured states of one document, and the checks it must pass on arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from firesteel.errors import HiddenStateError


@dataclass
class HiddenSample:
    """What the target left behind of one document of T tokens.

    Attributes:
        key: content hash of the document; names it in stores and errors.
        token_ids: `[T]` int64.
        loss_mask: `[T]` bool, True where the *token* is supervised.
        aux: `[T, m, d]`; `aux[p, i]` is the residual stream at position p after `layer_ids[i]` layers (0 = embeddings).
        last: `[S, d]`; residual stream after all layers, before the final norm, only where some block can predict.
        last_positions: `[S]` int64, ascending: the positions of `last`. Row q holds the target's distribution of token q + 1.
        layer_ids: the captured layers, ids as in Transformers' `hidden_states`.
        target: fingerprint of the target.
        last_lognorm: `[S]` float32, log-sum-exp of the target's logits at `last_positions`; with it a reduced draft vocabulary
            can be trained against the exact probabilities without the whole LM head. None where the engine does not give it.
    """

    key: str
    token_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    last_positions: Tensor
    layer_ids: tuple[int, ...]
    target: str
    last_lognorm: Tensor | None = None

    def __len__(self) -> int:
        return self.token_ids.shape[0]


def predictable_positions(loss_mask: Tensor) -> Tensor:
    """Positions p whose next token is supervised: where the target's distribution is needed. `[T]` bool -> `[S]` int64."""
    return loss_mask[1:].nonzero(as_tuple=True)[0]


def check_sample(sample: HiddenSample, *, layer_ids: tuple[int, ...], target: str) -> None:
    """Refuse a sample that training could only learn nonsense from.

    Raises:
        HiddenStateError: lengths differ, wrong layers or target, a state that is not finite, zero or constant.
    """
    s, t = sample, len(sample)
    if s.target != target:
        _bad(s, f"was captured from target {s.target}, this run trains for {target}")
    if s.layer_ids != layer_ids:
        _bad(s, f"has layers {list(s.layer_ids)}, the recipe wants {list(layer_ids)}")
    if s.loss_mask.shape[0] != t or s.aux.shape[0] != t:
        _bad(s, f"has {t} tokens, {s.loss_mask.shape[0]} mask entries and {s.aux.shape[0]} states")
    if s.aux.ndim != 3 or s.aux.shape[1] != len(layer_ids):
        _bad(s, f"has states of shape {list(s.aux.shape)} for {len(layer_ids)} layers")
    if s.last.shape[0] != s.last_positions.shape[0]:
        _bad(s, f"has {s.last.shape[0]} last states for {s.last_positions.shape[0]} positions")
    if s.last_lognorm is not None and s.last_lognorm.shape != s.last_positions.shape:
        _bad(s, f"has {s.last_lognorm.shape[0]} normalisers for {s.last_positions.shape[0]} positions")
    if not torch.equal(s.last_positions, predictable_positions(s.loss_mask)):
        _bad(s, "has last states at other positions than its loss mask needs")
    if not bool(s.loss_mask.any()):
        _bad(s, "has no supervised token")
    for name, states in [*((f"layer {i}", s.aux[:, j]) for j, i in enumerate(layer_ids)), ("the last layer", s.last)]:
        _check_states(s, name, states)


def _check_states(sample: HiddenSample, name: str, states: Tensor) -> None:
    """`[T, d]` states of one layer. Two passes that write next to nothing: this is done with every sample, while training waits for the next."""
    if not states.numel():
        _bad(sample, f"has no states in {name}")
    high, low = states.amax(-1), states.amin(-1)  # NaN in one of d numbers is NaN here
    if not bool((torch.isfinite(high) & torch.isfinite(low)).all()):
        _bad(sample, f"has non-finite states in {name}")
    zero = (high == 0) & (low == 0)
    if bool(zero.all()):
        _bad(sample, f"has only zeros in {name}")
    if bool(zero.any()):
        _bad(sample, f"has an all-zero state in {name}")
    if len(states) > 1 and bool((high == high[0]).all()) and bool((states == states[0]).all()):
        _bad(sample, f"has the same state at every position in {name}")


def _bad(sample: HiddenSample, what: str) -> NoReturn:
    raise HiddenStateError(f"sample {sample.key} {what}", mend="the stage `extract` makes states anew: firesteel extract RECIPE")
