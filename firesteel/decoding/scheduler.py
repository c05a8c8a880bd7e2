"""How many drafts of each request a step verifies: DSpark's hardware-aware prefix scheduler (arXiv 2607.05147, Algorithm 1).

Draft j of request r survives with probability a_{r,j} = c_{r,1} ... c_{r,j}, the product of its calibrated confidences. A step that
verifies k drafts of R requests writes R + (sum of their a) tokens on average and has B = R + k tokens to run; with SPS(B) steps per
second the engine writes theta = (R + sum a) SPS(B) tokens per second. Drafts are taken in descending a.

Which drafts may be looked at decides whether the output keeps the target's distribution:

- `admit_early_stop` goes on while theta rises and stops for good where it does not. Draft j of a request is admitted or not on account
  of a_{r,1..j} and of what was admitted before it, and c_j is made from the tokens before j: so the decision stands before token j is
  known, and token j, where verified, is still a draw from its distribution. That is all that verification asks for.
- `best_capacity` looks at all lengths and takes the best. That would prefer rounds by their later tokens and bias the output, so it
  must only see numbers that do not depend on the tokens at hand: confidences of earlier steps, or expected ones.
- `admit_top` fills a capacity that was fixed in that way, in descending a, and is lossless for the same reason as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from firesteel.errors import VerificationError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
StepsPerSecond = Callable[[Ints], Floats]
# Survivals of each request's drafts: rows that may differ in length, or an array `[R, g]` with NaN where there is no draft.
Survival = Sequence[Sequence[float]] | Floats
# Seconds of steps, by tokens to run and requests that were drafted for.
StepSeconds = Callable[[Ints, Ints], Floats]


def admit_early_stop(survival: Survival, steps_per_second: StepsPerSecond) -> list[int]:
    """Algorithm 1: admit drafts in descending survival while the expected tokens per second rise; stop where they do not.

    Args:
        survival: for each request, a_{r,1}, a_{r,2}, ... (non-increasing, in [0, 1]; empty where nothing was drafted).
        steps_per_second: SPS of an ascending array of tokens per step, the first of which is the number of requests.

    Returns:
        for each request, how many of its drafts to verify.

    Raises:
        VerificationError: survival rises along a request's drafts, or is not a probability.
    """
    requests, gains = _in_order(survival)
    rate = _tokens_per_second(len(survival), gains, steps_per_second)
    worse = np.flatnonzero(rate[1:] <= rate[:-1])
    return _lengths(requests[: worse[0] if worse.size else len(gains)], len(survival))


def best_capacity(survival: Survival, steps_per_second: StepsPerSecond) -> int:
    """Tokens per step at which the expected tokens per second are highest, over all lengths: at least the number of requests.

    Meant for cost curves with stairs, where an early stop would stay below the first. **Not** to be applied to the drafts that
    the survival is of: see the module's text.
    """
    _, gains = _in_order(survival)
    return len(survival) + int(_tokens_per_second(len(survival), gains, steps_per_second).argmax())


def admit_top(survival: Survival, capacity: int) -> list[int]:
    """Fill a step up to `capacity` tokens with the drafts of highest survival; each request's own token comes first."""
    requests, _ = _in_order(survival)
    return _lengths(requests[: max(0, capacity - len(survival))], len(survival))


def worth_drafting(survival: Survival, seconds: StepSeconds, *, margin: float) -> list[int]:
    """Requests to draft for: lengths by which the expected tokens per second, drafting paid for, are highest; 0 is not drafted for.

    Args:
        survival: for each request what is *expected*, before anything is drafted; so it may be searched globally.
        seconds: cost of a step; the drafter's part rises with the requests it drafts for.
        margin: draft only where that is faster than no drafting by this share.
    """
    requests, gains = _in_order(survival)
    if not gains.size:
        return [0] * len(survival)
    # Ascending order of position among equals: a request's first entry is its first draft.
    first = np.zeros(len(gains), dtype=np.int64)
    first[np.unique(requests, return_index=True)[1]] = 1
    written = len(survival) + np.concatenate([[0.0], gains.cumsum()])
    tokens = np.arange(len(survival), len(survival) + len(gains) + 1)
    rate = written / seconds(tokens, np.concatenate([[0], first.cumsum()]))
    best = int(rate.argmax())
    return _lengths(requests[: best if rate[best] > rate[0] * (1 + margin) else 0], len(survival))


def _in_order(survival: Survival) -> tuple[Ints, Floats]:
    """Requests and survivals of all drafts in descending survival; of equals the earlier draft, then the earlier request, comes first.

    As survival does not rise along a request, this is the order in which one would take them without knowing what comes later.
    """
    table = survival if isinstance(survival, np.ndarray) else _table(survival)
    # Absent drafts are sorted behind all others.
    flat = np.where(np.isnan(table), -1.0, table).T.ravel()
    order = np.argsort(-flat, kind="stable")[: int((~np.isnan(table)).sum())]
    gains = flat[order]
    rising = (np.diff(np.where(np.isnan(table), -1.0, table), axis=1) > 0).any()
    if rising or (gains.size and not (gains[0] <= 1 and gains[-1] >= 0)):
        raise VerificationError("survival must be probabilities that never rise along a request's drafts", mend="pass products of confidences in [0, 1]")
    return order % max(1, len(table)), gains


def _table(survival: Sequence[Sequence[float]]) -> Floats:
    table = np.full((len(survival), max((len(row) for row in survival), default=0)), np.nan)
    for r, row in enumerate(survival):
        if any(a != a for a in row):
            raise VerificationError("survival must be numbers that never rise", mend="pass products of confidences in [0, 1]")
        table[r, : len(row)] = row
    return table


def _tokens_per_second(requests: int, gains: Floats, steps_per_second: StepsPerSecond) -> Floats:
    """theta with 0, 1, 2, ... of the drafts admitted. Sums run from the front: no entry depends on later drafts, not by rounding either."""
    tokens = np.arange(requests, requests + len(gains) + 1)
    return (requests + np.concatenate([[0.0], gains.cumsum()])) * np.asarray(steps_per_second(tokens), dtype=np.float64)


def _lengths(requests: Ints, count: int) -> list[int]:
    return [int(n) for n in np.bincount(requests, minlength=count)]
