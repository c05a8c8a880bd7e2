"""The loss that makes no `[R, V]` tensor: draft logits chunk by chunk, terms and gradient in the same pass.

Per chunk of whole blocks: the teacher's probabilities of its positions (kept from the chunk before where they overlap), the
draft's logits, log-sum-exp, D-PACE's weights if asked for, then terms and gradient in place of the logits, and from that the
gradients of rows and weights. Numbers and gradients are those of `dense.dense_loss`.

Extra memory: the teacher's buffer and at most two buffers of `chunk_rows` rows of V logits, the rows' gradients, and one
gradient per trainable weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from firesteel.errors import TrainingError
from firesteel.kernels.linear import matmul_nn, matmul_nt, matmul_tn, widened
from firesteel.losses.plan import Chunk, make_plan, teacher_height
from firesteel.losses.rowwise import Kernels, Terms
from firesteel.losses.types import Head, LossResult, LossWeights, Piece, Teacher, check_shapes, compute_dtype, denominator_of, teacher_weight
from firesteel.losses.weights import dpace_weights


def fused_loss(
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
    chunk_rows: int = 128,
    compile: bool = False,
    draft_rows: Tensor | None = None,
    candidates: int = 0,
) -> LossResult:
    """Loss and metrics of N blocks of g slots; conventions and terms are those of `types.py`.

    Args:
        pieces: the summands of the draft's logits, each `rows [R, k_i]` and `weight [V, k_i]`. Rows get gradients where they
            require them, weights too; a frozen LM head costs nothing in the backward direction but the rows' gradient.
        draft_head: scale and cap of the draft's logits.
        teacher: the target at the unique positions.
        labels: `[N, g]` true token in the draft vocabulary; -1 where it has none (cross entropy then counts 0, the rest counts).
        weights: `[N, g]` static slot weights; a slot of weight 0 is not computed.
        slot_target: `[N, g]` row of the teacher's states, -1 where none.
        loss_weights: factors of the terms.
        confidence_logits: `[N, g]` or None.
        denominator: divisor of the sum over slots; None takes the sum of the static weights, with D-PACE the number of valid slots.
        chunk_rows: most slots in flight; more pay less for reading the head again, and need more memory.
        compile: compile the elementwise passes (C on CPU, Inductor on an accelerator); quietly eager where there is no compiler.
        draft_rows: `[V]` target ids of the draft vocabulary, needed only if the teacher's weight has all rows.
        candidates: also return this many of each slot's likeliest tokens.

    Raises:
        TrainingError: shapes that do not belong together.
    """
    check_shapes(pieces, teacher, labels, weights, slot_target, confidence_logits)
    confidence = confidence_logits if loss_weights.confidence else None
    inputs = [t for piece in pieces for t in piece] + ([] if confidence is None else [confidence])
    needs = [torch.is_grad_enabled() and t.requires_grad for t in inputs]
    with torch.no_grad():
        walk = _Walk(
            pieces, draft_head, teacher, labels, weights, slot_target, loss_weights, confidence, denominator, chunk_rows, compile, draft_rows, candidates, needs
        )
        result = walk.run()
    if any(needs):
        result.loss = _Attach.apply(result.loss, walk.gradients, *inputs)
    return result


class _Attach(torch.autograd.Function):
    """Hangs finished gradients under a finished loss."""

    @staticmethod
    def forward(ctx: FunctionCtx, loss: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients  # type: ignore[attr-defined]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] | None = ctx.gradients  # type: ignore[attr-defined]
        if gradients is None:
            raise TrainingError("the fused loss was asked for its gradient twice", mend="compute the loss again for a second backward pass")
        ctx.gradients = None  # type: ignore[attr-defined]
        return None, None, *(None if g is None else g.mul_(scale.to(g.dtype)) for g in gradients)


@dataclass
class _Slots:
    """Flat results `[R]`, filled chunk by chunk; zero where nothing is computed."""

    count: int
    like: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)

    def put(self, name: str, rows: Tensor, values: Tensor) -> None:
        if name not in self.values:
            self.values[name] = values.new_zeros(self.count)
        self.values[name][rows] = values

    def get(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        found = self.values.get(name)
        return (self.like.new_zeros(self.count, dtype=dtype) if found is None else found).view(shape)


class _Walk:
    """One evaluation of the loss; `run` once, then read `gradients` (one per input, None where not needed)."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        draft_head: Head,
        teacher: Teacher,
        labels: Tensor,
        weights: Tensor,
        slot_target: Tensor,
        mix: LossWeights,
        confidence: Tensor | None,
        denominator: float | Tensor | None,
        chunk_rows: int,
        compile: bool,
        draft_rows: Tensor | None,
        candidates: int,
        needs: list[bool],
    ) -> None:
        self.pieces, self.scale, self.mix, self.confidence, self.needs = list(pieces), draft_head.scale, mix, confidence, needs
        self.dtype, self.vocab, device = compute_dtype(pieces), pieces[0][1].shape[0], pieces[0][0].device
        self.labels, self.weights = labels, weights.to(self.dtype)
        self.valid = (weights > 0) & (slot_target >= 0)
        self.denominator = denominator_of(denominator, self.weights, self.valid, mix.dpace, self.dtype)
        self.used = torch.zeros_like(self.weights) if mix.dpace else self.weights * self.valid
        self.factors = torch.tensor([mix.tv, mix.kl, mix.reverse_kl, mix.jsd], dtype=self.dtype, device=device)

        self.teacher, self.teacher_weight = teacher, teacher_weight(teacher, self.vocab, draft_rows)
        self.plan = make_plan(slot_target, self.valid, chunk_rows)
        height = min(teacher_height(chunk_rows, labels.shape[1]), teacher.states.shape[0])
        self.buffer = torch.empty(height if self.plan else 0, self.vocab, dtype=self.dtype, device=device)
        self.mass = self.buffer.new_empty(height)
        self.teacher_top = self.buffer.new_empty(height)

        logits_matter = any(needs[: 2 * len(self.pieces)])
        terms = Terms(mix.tv > 0, mix.kl > 0, mix.reverse_kl > 0, mix.jsd > 0, logits_matter, draft_head.softcap)
        self.kernels = Kernels(terms, self.buffer, compiled=compile)
        self.slots = _Slots(labels.numel(), self.buffer)
        self.candidates = torch.zeros(labels.numel(), candidates, dtype=torch.long, device=device)
        self.candidate_teacher = self.buffer.new_zeros(self.candidates.shape)
        # sums over chunks of a low-precision weight's gradient are kept in the dtype of the logits
        self.sums = [
            None if not need else torch.zeros_like(t, dtype=self.dtype if i % 2 else t.dtype, memory_format=torch.contiguous_format)
            for i, (need, t) in enumerate(zip(needs, [t for piece in self.pieces for t in piece], strict=False))
        ]
        self.gradients: list[Tensor | None] = []

    def run(self) -> LossResult:
        for chunk in self.plan:
            if chunk.refill is not None:
                self._refill(chunk.refill.keep, chunk.refill.fresh)
            self._chunk(chunk)
        return self._result()

    def _refill(self, keep: Tensor, fresh: Tensor) -> None:
        """New content of the teacher's buffer, see `plan.Refill`."""
        kept, last = keep.shape[0], keep.shape[0] + fresh.shape[0]
        for held in (self.buffer, self.mass, self.teacher_top):
            held[:kept] = held[keep]
        states = self.teacher.states[fresh].to(self.teacher_weight.dtype)
        logits = self._product(states, self.teacher_weight, self.teacher.head.scale)
        norm = None if self.teacher.lognorm is None else self.teacher.lognorm[fresh].to(self.dtype)
        self.mass[kept:last], self.teacher_top[kept:last] = self.kernels.normalise_teacher(logits, self.buffer[kept:last], norm, self.teacher.head.softcap)

    def _chunk(self, chunk: Chunk) -> None:
        terms, mix, rows = self.kernels.terms, self.mix, chunk.rows
        states = [piece_rows[rows] for piece_rows, _ in self.pieces]
        x = self._logits(states)
        norm, top = self.kernels.normalise_draft(x)

        label = self.labels.view(-1)[rows]
        known, index = label >= 0, label.clamp(min=0)
        true = x.gather(1, index[:, None])[:, 0]
        log_true = torch.where(known, true - norm, 0)
        prob_true = log_true.exp() * known
        self.slots.put("ce", rows, -log_true)
        self.slots.put("prob_true", rows, prob_true)
        self.slots.put("correct", rows, (true == top) & known)
        if self.candidates.shape[1]:
            best = x.topk(self.candidates.shape[1], -1).indices
            teacher = self.buffer[chunk.place[:, None], best]
            self.candidates[rows], self.candidate_teacher[rows] = best, teacher.exp() if terms.log_teacher else teacher
        if mix.dpace:
            q, valid = self.slots.get("prob_true", self.labels.shape, self.dtype)[chunk.blocks], self.valid[chunk.blocks]
            self.used[chunk.blocks] = dpace_weights(q, valid, mix.dpace_smoothing)
        weight = self.used.view(-1)[rows] / self.denominator

        ce = known.to(self.dtype) * mix.ce
        per_row = (x, norm, top, chunk.place, self.mass[chunk.place], self.teacher_top[chunk.place], ce, weight)
        for name, value in zip(("tv", "agree", "kl", "reverse_kl", "jsd"), self.kernels.finish(per_row, self.buffer, self.factors), strict=True):
            self.slots.put(name, rows, value)
        if not terms.gradient:
            return
        one = -ce * weight
        if terms.softcap is not None:
            one = one * (1 - (true / terms.softcap).square())
        x.scatter_add_(1, index[:, None], one[:, None])
        self._backward(x, rows, states)

    def _logits(self, states: list[Tensor]) -> Tensor:
        x: Tensor | None = None
        for state, (_, weight) in zip(states, self.pieces, strict=True):
            x = self._product(state, weight, self.scale, add=x)
        assert x is not None
        return x

    def _product(self, states: Tensor, weight: Tensor, scale: float, add: Tensor | None = None) -> Tensor:
        """`scale * states @ weight.T (+ add)` in the dtype of the logits; the scale goes where it is cheap or, in low precision, exact.

        A weight of low precision (a frozen head as the target has it) takes the states in its own.
        """
        if states.dtype == weight.dtype == self.dtype:
            return matmul_nt(_times(states, scale), weight, add=add, wide=True)
        product = _times(widened(states.to(weight.dtype), weight.T).to(self.dtype), scale)
        return product if add is None else add.add_(product)

    def _backward(self, gradient: Tensor, rows: Tensor, states: list[Tensor]) -> None:
        """Gradient `[n, V]` of the chunk's logits (before the cap) -> the inputs' gradients."""
        for i, (state, (_, weight)) in enumerate(zip(states, self.pieces, strict=True)):
            row_sum, weight_sum = self.sums[2 * i], self.sums[2 * i + 1]
            upstream = gradient if weight.dtype == self.dtype else gradient.to(weight.dtype)
            if row_sum is not None:
                row_sum[rows] = _times(matmul_nn(upstream, weight), self.scale).to(row_sum.dtype)
            if weight_sum is not None:
                if state.dtype == weight.dtype == weight_sum.dtype:
                    matmul_tn(upstream, _times(state, self.scale), accumulate=weight_sum)
                else:
                    weight_sum.add_(matmul_tn(upstream, state.to(weight.dtype)), alpha=self.scale)

    def _result(self) -> LossResult:
        shape, mix, valid = self.labels.shape, self.mix, self.valid

        def slot(name: str) -> Tensor:
            return self.slots.get(name, shape, torch.bool if name in ("agree", "correct") else self.dtype)

        tv = slot("tv")
        accept = (1 - tv) * valid
        total = mix.ce * slot("ce") + mix.tv * tv + mix.kl * slot("kl") + mix.reverse_kl * slot("reverse_kl") + mix.jsd * slot("jsd")
        inputs = [t for piece in self.pieces for t in piece]
        self.gradients = [None if g is None else g.to(t.dtype) for g, t in zip(self.sums, inputs, strict=True)]
        bce: Tensor | None = None
        if self.confidence is not None:
            logits = self.confidence.to(self.dtype)
            bce = torch.where(valid, F.binary_cross_entropy_with_logits(logits, accept, reduction="none"), 0)
            total = total + mix.confidence * bce
            factor = self.used * (mix.confidence / self.denominator)
            self.gradients.append(torch.where(valid, factor * (logits.sigmoid() - accept), 0).to(self.confidence.dtype) if self.needs[-1] else None)
        return LossResult(
            loss=(self.used * total).sum() / self.denominator,
            denominator=self.denominator,
            weights=self.used,
            valid=valid,
            ce=slot("ce"),
            tv=tv,
            accept=accept,
            prob_true=slot("prob_true"),
            correct=slot("correct"),
            agree=slot("agree"),
            kl=slot("kl") if mix.kl else None,
            reverse_kl=slot("reverse_kl") if mix.reverse_kl else None,
            jsd=slot("jsd") if mix.jsd else None,
            confidence=bce,
            candidates=self.candidates.view(*shape, -1) if self.candidates.shape[1] else None,
            candidate_teacher=self.candidate_teacher.view(*shape, -1) if self.candidates.shape[1] else None,
        )


def _times(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale
