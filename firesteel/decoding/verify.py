"""Speculative verification: which drafted tokens stand, and what follows them.

Two rules with the same output distribution, the target's own:

- `token` (arXiv 2211.17192, 2302.01318): each draft stands with probability min(1, p_t / p_d), up to the first that falls.
- `block` (arXiv 2403.10444): the drafts are judged together; a later success saves earlier ones. With r_0 = 1 and
  r_i = min(1, r_{i-1} p_t(x_i) / p_d(x_i)), the first i drafts stand with probability r_i given what they are, which is never
  less than the product of min(1, p_t / p_d) that `token` gives them.

Why `block` is lossless: let S_i = sum_v max(r_i p_t(v) - p_d(v), 0), over what may follow the first i drafts. If i + 1 or more
drafts stand with probability sum_v p_d(v) r_{i+1}(v) = r_i - S_i, then accepting i with S_i / (S_i + 1 - r_i) where none of the
longer prefixes stood makes "i or more" r_i, and "exactly i" S_i. A text that begins with the i drafts and token v then has
probability p_d(v) r_{i+1}(v) + max(r_i p_t(v) - p_d(v), 0) = r_i p_t(v), times that of drafting the i: the target's share. The
argument looks at one prefix at a time, so the block may also end early, on account of the tokens before its end (`policies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from firesteel.decoding.sampling import Chance, Sampling, distributions
from firesteel.errors import RecipeError, VerificationError

Rejection = Literal["token", "block"]


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
    return min(1.0, _ratio(float(target[token]), float(draft[token]), token))


def residual(target: Tensor, draft: Tensor, weight: float = 1.0) -> Tensor:
    """`norm(max(weight * p_t - p_d, 0))`, `[V]`: what replaces a rejected token (`weight` is block verification's r_i, else 1).

    Where the two are equal nothing is ever rejected; rounding may still lead here, and the target's own distribution is then right.
    """
    rest = (weight * target - draft.to(target.dtype)).clamp_min(0)
    total = rest.sum()
    return rest / total if float(total) > 0 else target


def verify_tokens(
    draft_tokens: Sequence[int],
    draft_probs: Tensor | None,
    target_logits: Tensor,
    sampling: Sampling,
    chance: Chance,
    rejection: Rejection = "token",
) -> Verdict:
    """Verify n drafted tokens against the target; the outcome is distributed as the target alone would write.

    Args:
        draft_tokens: n target token ids, drawn left to right.
        draft_probs: `[n, V]` the distributions they were drawn from, over target ids (a reduced draft vocabulary leaves zeros);
            None where the drafter is deterministic (one-hot distributions).
        target_logits: `[n + 1, V]`; row k follows k drafted tokens.
        sampling: the target's sampling. Greedy accepts exactly the tokens the target would choose, under either rule.
        chance: where random choices come from.
        rejection: the rule, `token` or `block`.

    Raises:
        VerificationError: the drafts do not fit the logits, or the drafter gives a token of its own no probability.
        RecipeError: there is no such rule.
    """
    n = len(draft_tokens)
    if target_logits.shape[0] != n + 1:
        raise VerificationError(f"{n} drafted tokens need {n + 1} rows of target logits, not {target_logits.shape[0]}")
    if rejection not in ("token", "block"):
        raise RecipeError(f"rejection={rejection!r} is not a rule of verification", mend="choose token or block")
    if sampling.greedy:
        return verify_greedy(draft_tokens, target_logits.argmax(-1).tolist())
    probs = distributions(target_logits, sampling)
    drafts = _one_hot(probs, draft_tokens) if draft_probs is None else draft_probs
    return (_by_token if rejection == "token" else _by_block)(draft_tokens, drafts, probs, chance)


def verify_greedy(draft_tokens: Sequence[int], chosen: Sequence[int]) -> Verdict:
    """The verdict at temperature 0, from n drafts and the `n + 1` tokens that the target would choose."""
    accepted = next((k for k, token in enumerate(draft_tokens) if token != chosen[k]), len(draft_tokens))
    return Verdict(accepted, chosen[accepted])


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


def block_weights(ratios: Sequence[float]) -> list[float]:
    """`r_0 .. r_n` of block verification from p_t(x_i) / p_d(x_i), i = 1 .. n."""
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


def block_accept(weight: float, surplus: float) -> float:
    """Probability of accepting a prefix short of the block's end where no longer one was: `S / (S + 1 - r)`; 1 where both vanish."""
    return surplus / (surplus + 1 - weight) if weight < 1 else 1.0


def _by_token(tokens: Sequence[int], drafts: Tensor, probs: Tensor, chance: Chance) -> Verdict:
    for k, token in enumerate(tokens):
        if not chance.accept(accept_probability(probs[k], drafts[k], token)):
            return Verdict(k, chance.pick(residual(probs[k], drafts[k])))
    return Verdict(len(tokens), chance.pick(probs[len(tokens)]))


def _by_block(tokens: Sequence[int], drafts: Tensor, probs: Tensor, chance: Chance) -> Verdict:
    n = len(tokens)
    rows, columns = list(range(n)), list(tokens)
    own, drawn = probs[rows, columns].tolist(), drafts[rows, columns].tolist()
    weights = block_weights([_ratio(t, d, x) for t, d, x in zip(own, drawn, tokens, strict=True)])
    scale = torch.tensor(weights[:n], dtype=probs.dtype, device=probs.device)[:, None]
    surplus = (scale * probs[:n] - drafts.to(probs.dtype)).clamp_min(0).sum(-1).tolist()
    # The draws for all prefixes are independent and the longest success counts, so they are made from the longest on. The empty
    # prefix always stands.
    accepted = next((i for i in range(n, 0, -1) if chance.accept(weights[n] if i == n else block_accept(weights[i], surplus[i]))), 0)
    return Verdict(accepted, chance.pick(probs[n] if accepted == n else residual(probs[accepted], drafts[accepted], weights[accepted])))


def _ratio(target: float, draft: float, token: int) -> float:
    if draft <= 0:
        raise VerificationError(
            f"the drafter drew token {token}, to which its own distribution gives probability {draft}",
            mend="the drafter's distributions must be over target token ids, after temperature, exactly those that it sampled from",
        )
    return target / draft


def _one_hot(probs: Tensor, tokens: Sequence[int]) -> Tensor:
    """`[n, V]`, like the first n rows."""
    rows = torch.zeros_like(probs[: len(tokens)])
    rows[list(range(len(tokens))), list(tokens)] = 1
    return rows
