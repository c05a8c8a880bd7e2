"""The elementwise half of the fused loss: plain functions of a few rows of logits, eager on cache-sized tiles or compiled.

Three passes: `normalise_teacher` (once per teacher row), `normalise_draft`, `finish` (terms and gradient). All write in place.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    x: Tensor, lognorm: Tensor, top: Tensor, teacher: Tensor, place: Tensor, mass: Tensor, teacher_top: Tensor, ce: Tensor, weight: Tensor, mix: Tensor, terms: Terms
) -> tuple[Tensor, ...]:
    """Terms of n slots, and the gradient of their weighted sum.

    Args:
        x: `[n, V]` capped draft logits; replaced by the gradient with respect to the logits before the cap
            (less the true token's own entry of the cross entropy) where `terms.gradient`.
        lognorm, top: `[n]` from `normalise_draft`.
        teacher: `[*, V]` buffer of p_t or log p_t; slot i's is row `place[i]`.
        mass, teacher_top: `[n]` of the slot's teacher row.
        ce: `[n]` factor of p_d in the gradient of the cross entropy: its loss weight, or 0 where the label is unknown.
        weight: `[n]` slot weight / denominator.
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
    """The three functions, compiled where asked for and possible, else run on tiles of rows that stay in cache."""

    def __init__(self, *, compiled: bool, device: torch.device) -> None:
        self._compiled = compiled and True
        self._tiled = device.type == "cpu"

    def normalise_teacher(self, logits: Tensor, out: Tensor, lognorm: Tensor | None, softcap: float | None, log_teacher: bool) -> tuple[Tensor, Tensor]:
        got = self._call(normalise_teacher, (logits, out, lognorm), (softcap, log_teacher))
        return got[0], got[1]

    def normalise_draft(self, x: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
        got = self._call(normalise_draft, (x,), (softcap,))
        return got[0], got[1]

    def finish(
        self, x: Tensor, lognorm: Tensor, top: Tensor, teacher: Tensor, place: Tensor, mass: Tensor, teacher_top: Tensor, ce: Tensor, weight: Tensor, mix: Tensor, terms: Terms
    ) -> tuple[Tensor, ...]:
        return self._call(finish, (x, lognorm, top, _Whole(teacher), place, mass, teacher_top, ce, weight, _Whole(mix)), (terms,))

    def _call(self, function: Callable[..., tuple[Tensor, ...]], rowwise: tuple[Any, ...], fixed: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Run on all rows at once (compiled, CUDA) or tile by tile; `_Whole` arguments are not cut."""
        x: Tensor = rowwise[0]
        rows = x.shape[0]
        if self._compiled and rows > 1:
            return _compiled(function)(*(a.tensor if isinstance(a, _Whole) else a for a in rowwise), *fixed)
        step = max(1, TILE_ELEMENTS // x.shape[1]) if self._tiled else rows
        parts = [
            function(*(a.tensor if isinstance(a, _Whole) else None if a is None else a[i : i + step] for a in rowwise), *fixed) for i in range(0, rows, step)
        ]
        return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))


@dataclass
class _Whole:
    tensor: Tensor


_cache: dict[Any, Any] = {}
