"""The elementwise half of the fused loss, as plain functions of a few rows of logits.

Three passes: `normalise_teacher` (once per teacher row), `normalise_draft`, `finish` (terms and gradient). All write in place.
`Kernels` runs them: in C (`native.py`), through Inductor, or eagerly on tiles that stay in cache.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.losses import native

Pass = Callable[..., tuple[Tensor, ...]]

TILE_ELEMENTS = 1 << 18  # eager CPU tiles: a few float32 temporaries of 1 MB stay in the caches


@dataclass(frozen=True)
class Terms:
    """What `finish` has to compute; part of what a compiled kernel is specialised on.

    `log_teacher` says that the teacher's buffer holds log p_t (the logarithmic terms need it) instead of p_t.
    """

    tv: bool
    kl: bool
    reverse_kl: bool
    jsd: bool
    gradient: bool
    softcap: float | None

    @property
    def log_teacher(self) -> bool:
        return self.kl or self.reverse_kl or self.jsd


def normalise_teacher(logits: Tensor, out: Tensor, lognorm: Tensor | None, softcap: float | None, log_teacher: bool) -> tuple[Tensor, Tensor]:
    """Logits `[n, V]` before the cap -> `out [n, V]`, p_t or log p_t. Returns the mass `[n]` of p_t and its largest entry `[n]` as in `out`."""
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    if lognorm is None:
        top = x.amax(-1, keepdim=True)
        norm = top + torch.exp(x - top).sum(-1, keepdim=True).log()
    else:
        norm = lognorm[:, None]
    logs = x - norm
    probs = torch.exp(logs)
    kept = logs if log_teacher else probs
    out.copy_(kept)
    mass = torch.ones_like(probs[:, 0]) if lognorm is None else probs.sum(-1)
    return mass, kept.amax(-1)


def normalise_draft(x: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Caps `x [n, V]` in place; returns log-sum-exp `[n]` and largest logit `[n]`."""
    if softcap is not None:
        x.copy_(softcap * torch.tanh(x / softcap))
    top = x.amax(-1)
    return top + torch.exp(x - top[:, None]).sum(-1).log(), top


def finish(
    x: Tensor,
    lognorm: Tensor,
    top: Tensor,
    place: Tensor,
    mass: Tensor,
    teacher_top: Tensor,
    ce: Tensor,
    weight: Tensor,
    teacher: Tensor,
    mix: Tensor,
    terms: Terms,
) -> tuple[Tensor, ...]:
    """Terms of n slots, and the gradient of their weighted sum.

    Args:
        x: `[n, V]` capped draft logits; replaced by the gradient with respect to the logits before the cap
            (less the true token's own entry of the cross entropy) where `terms.gradient`.
        lognorm, top: `[n]` from `normalise_draft`.
        place: `[n]` the slot's row of `teacher`.
        mass, teacher_top: `[n]` of that row, from `normalise_teacher`.
        ce: `[n]` factor of p_d in the gradient of the cross entropy: its loss weight, or 0 where the label is unknown.
        weight: `[n]` slot weight / denominator.
        teacher: `[*, V]` buffer of p_t or log p_t.
        mix: `[4]` factors of TV, KL, reverse KL, JSD.

    Returns:
        tv, agree (bool), kl, reverse_kl, jsd: `[n]` each; zeros where a divergence is not asked for.

    With f = d(terms)/dp_d the gradient is `p_d (f - sum p_d f) + kl (S p_d - p_t) + ce (p_d - onehot)`; for TV f is
    `1/2 sign(p_d - p_t)`.
    """
    t = teacher.index_select(0, place)
    log_pd = x - lognorm[:, None]
    pd = torch.exp(log_pd)
    pt = torch.exp(t) if terms.log_teacher else t
    agree = torch.where(x == top[:, None], t, -math.inf).amax(-1) == teacher_top
    difference = pd - pt
    missing = 1 - mass
    tv = difference.abs().sum(-1) / 2 + missing / 2
    kl = reverse_kl = jsd = torch.zeros_like(tv)
    force: Tensor | None = mix[0] / 2 * torch.sign(difference) if terms.tv else None
    if terms.kl:
        kl = (pt * (t - log_pd)).sum(-1) + missing
    if terms.reverse_kl:
        ratio = log_pd - t
        reverse_kl = (pd * ratio).sum(-1)
        force = mix[2] * ratio if force is None else force + mix[2] * ratio
    if terms.jsd:
        log_mean = torch.log((pd + pt).clamp(min=torch.finfo(x.dtype).tiny) / 2)
        jsd = ((pt * (t - log_mean)).sum(-1) + (pd * (log_pd - log_mean)).sum(-1) + missing * math.log(2)) / 2
        half = mix[3] / 2 * (log_pd - log_mean)
        force = half if force is None else force + half
    if terms.gradient:
        own = ce + mix[1] * mass if terms.kl else ce
        if force is not None:
            own = own - (pd * force).sum(-1)
            gradient = pd * (force + own[:, None])
        else:
            gradient = pd * own[:, None]
        if terms.kl:
            gradient = gradient - mix[1] * pt
        gradient = gradient * weight[:, None]
        if terms.softcap is not None:
            gradient = gradient * (1 - (x / terms.softcap).square())
        x.copy_(gradient)
    return tv, agree, kl, reverse_kl, jsd


class Kernels:
    """The three passes by the fastest means at hand: C on CPU or Inductor elsewhere if `compiled`, else eager tiles of rows that stay in cache."""

    def __init__(self, terms: Terms, like: Tensor, *, compiled: bool) -> None:
        self.terms = terms
        self._native = compiled and native.usable(like, terms.jsd)
        self._inductor = compiled and like.device.type != "cpu"
        self._tile = TILE_ELEMENTS if like.device.type == "cpu" else sys.maxsize

    def normalise_teacher(self, logits: Tensor, out: Tensor, lognorm: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor]:
        if self._native:
            return native.normalise_teacher(logits, out, lognorm, softcap, self.terms.log_teacher)
        mass, top = self._call(normalise_teacher, (logits, out, lognorm), (), (softcap, self.terms.log_teacher))
        return mass, top

    def normalise_draft(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._native:
            return native.normalise_draft(x, self.terms.softcap)
        norm, top = self._call(normalise_draft, (x,), (), (self.terms.softcap,))
        return norm, top

    def finish(self, rows: tuple[Tensor, ...], teacher: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
        """`rows`: x, lognorm, top, place, mass, teacher_top, ce, weight. Returns tv, agree, kl, reverse_kl, jsd."""
        if self._native:
            got = native.finish(rows, teacher, mix, self.terms.softcap, self.terms.log_teacher, self.terms.gradient)
            return *got, torch.zeros_like(got[0])
        return self._call(finish, rows, (teacher, mix), (self.terms,))

    def _call(self, function: Pass, rows: tuple[Tensor | None, ...], whole: tuple[Tensor, ...], fixed: tuple[object, ...]) -> tuple[Tensor, ...]:
        """Run on all rows at once (Inductor, or a device with memory to spare) or tile by tile."""
        x = rows[0]
        assert x is not None
        if self._inductor and x.shape[0] > 1:  # Inductor makes a special case of one row
            return _inductor(function)(*rows, *whole, *fixed)
        step = max(1, self._tile // x.shape[1])
        tiles = [function(*(None if a is None else a[i : i + step] for a in rows), *whole, *fixed) for i in range(0, x.shape[0], step)]
        return tiles[0] if len(tiles) == 1 else tuple(torch.cat(column) for column in zip(*tiles, strict=True))


@functools.cache
def _inductor(function: Pass) -> Pass:
    """Compiled for any number of rows; where that fails, the function itself from then on, with one warning."""
    compiled = torch.compile(function, dynamic=True, fullgraph=True)
    works = True

    def run(*args: object) -> tuple[Tensor, ...]:
        nonlocal works
        if works:
            try:
                return compiled(*args)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as e:
                works = False
                warnings.warn(f"torch.compile failed ({type(e).__name__}): the loss runs uncompiled, somewhat slower", stacklevel=2)
        return function(*args)

    return run
