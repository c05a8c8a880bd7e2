"""The obvious loss: every `[R, V]` tensor is made, autograd does the rest. The reference that `fused.py` must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from firesteel.losses.types import Head, LossResult, LossWeights, Piece, Teacher, check_shapes, compute_dtype, denominator_of, teacher_weight
from firesteel.losses.weights import dpace_weights


def dense_loss(
    pieces: Sequence[Piece],
    draft_head: Head,
    teacher: Teacher,
    labels: Tensor,
    weights: Tensor,
    slot_target: Tensor,
    loss_weights: LossWeights,
    confidence_logits: Tensor | None = None,
    *,
    denominator: float | Tensor | None = None,
    draft_rows: Tensor | None = None,
    candidates: int = 0,
) -> LossResult:
    """Loss and metrics of N blocks of g slots; arguments as in `fused.fused_loss`."""
    check_shapes(pieces, teacher, labels, weights, slot_target, confidence_logits)
    dtype, mix = compute_dtype(pieces), loss_weights
    valid = (weights > 0) & (slot_target >= 0)
    logits = _cap(sum((rows @ weight.T).to(dtype) for rows, weight in pieces), draft_head).view(*labels.shape, -1)  # type: ignore[arg-type]
    log_pd = F.log_softmax(logits, -1)
    pd = log_pd.exp()

    with torch.no_grad():
        head = teacher_weight(teacher, logits.shape[-1], draft_rows)
        target = _cap((teacher.states.to(head.dtype) @ head.T).to(dtype), teacher.head)
        norm = target.logsumexp(-1) if teacher.lognorm is None else teacher.lognorm.to(dtype)
        log_pt = (target - norm[:, None])[slot_target.clamp(min=0)]
        pt = log_pt.exp()
        missing = 1 - pt.sum(-1) if teacher.lognorm is not None else torch.zeros_like(pt[..., 0])

    known = labels >= 0
    log_true = log_pd.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    log_mean = torch.log((pd + pt).clamp(min=torch.finfo(dtype).tiny) / 2)
    ce = -log_true * known
    tv = (pd - pt).abs().sum(-1) / 2 + missing / 2
    kl = (pt * (log_pt - log_pd)).sum(-1) + missing
    reverse_kl = (pd * (log_pd - log_pt)).sum(-1)
    jsd = ((pt * (log_pt - log_mean)).sum(-1) + (pd * (log_pd - log_mean)).sum(-1) + missing * math.log(2)) / 2
    accept = 1 - tv.detach()
    prob_true = log_true.detach().exp() * known * valid

    used = dpace_weights(prob_true, valid, mix.dpace_smoothing) if mix.dpace else weights.to(dtype) * valid
    total = denominator_of(denominator, weights, valid, mix.dpace, dtype)
    terms = mix.ce * ce + mix.tv * tv + mix.kl * kl + mix.reverse_kl * reverse_kl + mix.jsd * jsd
    bce: Tensor | None = None
    if confidence_logits is not None and mix.confidence:
        bce = F.binary_cross_entropy_with_logits(confidence_logits.to(dtype), accept, reduction="none")
        terms = terms + mix.confidence * bce
    choice = logits.argmax(-1)
    best = logits.detach().topk(candidates, -1).indices * valid[..., None] if candidates else None

    def slot(value: Tensor) -> Tensor:
        return torch.where(valid, value.detach(), 0)

    return LossResult(
        loss=(used * torch.where(valid, terms, 0)).sum() / total,
        denominator=total,
        weights=used,
        valid=valid,
        ce=slot(ce),
        tv=slot(tv),
        accept=slot(accept),
        prob_true=prob_true,
        correct=(choice == labels) & valid,
        agree=(choice == log_pt.argmax(-1)) & valid,
        kl=slot(kl) if mix.kl else None,
        reverse_kl=slot(reverse_kl) if mix.reverse_kl else None,
        jsd=slot(jsd) if mix.jsd else None,
        confidence=None if bce is None else slot(bce),
        candidates=best,
        candidate_teacher=None if best is None else torch.where(valid[..., None], pt.gather(-1, best), 0),
    )


def _cap(x: Tensor, head: Head) -> Tensor:
    x = x * head.scale
    return x if head.softcap is None else head.softcap * torch.tanh(x / head.softcap)
