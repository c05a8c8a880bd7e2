"""Log-probabilities of the emitted tokens, as users of the OpenAI API expect them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.errors import RecipeError

# What OpenAI's API says of a token without probability: JSON has no infinity.
IMPOSSIBLE = -9999.0


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its natural log-probability, and the likeliest tokens of its position with theirs, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities under the target's own distribution: at temperature 1, before any cut, whatever the sampling was.

    A token of a speculative round has the same one as if the target had written it alone: row k of the round's logits follows
    the same k tokens either way. What the drafter thought, and which rule accepted the token, do not enter.

    Args:
        logits: `[n or more, V]`, row k is what token k was chosen from; further rows (of drafts that fell) are ignored.
        tokens: n emitted tokens.
        top: likeliest tokens to add at each position (OpenAI's `top_logprobs`); the emitted token need not be among them.

    Raises:
        RecipeError: `top` is negative.
    """
    if top < 0:
        raise RecipeError(f"logprobs={top} is negative", mend="0 gives the emitted tokens' alone")
    rows = logits[: len(tokens)].double().log_softmax(-1)
    own = rows.gather(-1, torch.as_tensor(list(tokens), dtype=torch.long, device=rows.device)[:, None])[:, 0].tolist()
    best = rows.topk(min(top, rows.shape[-1]), -1)
    return [
        TokenLogprob(token, max(own[k], IMPOSSIBLE), tuple((i, max(p, IMPOSSIBLE)) for i, p in zip(ids, values, strict=True)))
        for k, (token, ids, values) in enumerate(zip(tokens, best.indices.tolist(), best.values.tolist(), strict=True))
    ]
