"""Token-wise speculative verification: which drafted tokens stand, and what follows them (Leviathan 2023; Chen 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.decoding.sampling import Chance, Sampling, distributions
from firesteel.errors import VerificationError


@dataclass(frozen=True)
class Verdict:
    """`accepted` leading drafts stand and `next_token` follows them: a replacement, or a bonus where all stand."""

    accepted: int
    next_token: int


def accept_probability(target: Tensor, draft: Tensor, token: int) -> float:
    """`min(1, p_t(x) / p_d(x))` for `[V]` distributions and a token drawn from the draft's.

    Raises:
        VerificationError: the drafter gives its own token no probability, so its distribution is not the one it drew from.
    """
    drawn = float(draft[token])
    if drawn <= 0:
        raise VerificationError(
            f"the drafter drew token {token}, to which its own distribution gives probability {drawn}",
            mend="the drafter's distributions must be over target token ids, after temperature, exactly those that it sampled from",
        )
    return min(1.0, float(target[token]) / drawn)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """`norm(max(p_t - p_d, 0))`, `[V]`: what replaces a rejected token.

    Where the two are equal nothing is ever rejected; rounding may still lead here, and the target's own distribution is then right.
    """
    rest = (target - draft.to(target.dtype)).clamp_min(0)
    total = rest.sum()
    return rest / total if float(total) > 0 else target


def verify_tokens(draft_tokens: Sequence[int], draft_probs: Tensor | None, target_logits: Tensor, sampling: Sampling, chance: Chance) -> Verdict:
    """Verify n drafted tokens against the target; the outcome is distributed as the target alone would write.

    Args:
        draft_tokens: n target token ids, drawn left to right.
        draft_probs: `[n, V]` the distributions they were drawn from, over target ids (a reduced draft vocabulary leaves zeros);
            None where the drafter is deterministic (one-hot distributions).
        target_logits: `[n + 1, V]`; row k follows k drafted tokens.
        sampling: the target's sampling. Greedy accepts exactly the tokens the target would choose.
        chance: where random choices come from.
    """
    n = len(draft_tokens)
    if target_logits.shape[0] != n + 1:
        raise VerificationError(f"{n} drafted tokens need {n + 1} rows of target logits, not {target_logits.shape[0]}")
    if sampling.greedy:
        chosen: list[int] = target_logits.argmax(-1).tolist()
        accepted = next((k for k in range(n) if draft_tokens[k] != chosen[k]), n)
        return Verdict(accepted, chosen[accepted])
    probs = distributions(target_logits, sampling)
    for k, token in enumerate(draft_tokens):
        draft = _one_hot(probs[k], token) if draft_probs is None else draft_probs[k]
        if not chance.accept(accept_probability(probs[k], draft, token)):
            return Verdict(k, chance.pick(residual(probs[k], draft)))
    return Verdict(n, chance.pick(probs[n]))


def verified_length(confidences: Sequence[float], threshold: float) -> int:
    """How many drafted tokens to submit: the longest prefix whose product of confidences stays at or above `threshold`.

    This keeps the output distribution because token k is submitted or not on account of c_1 .. c_k alone, and c_k is
    made from the tokens *before* k (their slots and the predecessor's embedding): the decision stands before token k
    is drawn, so that k, where submitted, is still a draw from its distribution. A rule that looks at token k itself,
    or at a later one (say, the best expected speed over all lengths), would prefer rounds by their tokens and bias them.
    """
    product, length = 1.0, 0
    for confidence in confidences:
        product *= confidence
        if product < threshold:
            break
        length += 1
    return length


def _one_hot(like: Tensor, token: int) -> Tensor:
    row = torch.zeros_like(like)
    row[token] = 1
    return row
