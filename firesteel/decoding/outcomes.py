"""What became of requests' drafts: acceptance rates by position, and how far confidences can be trusted.

Tallies of a request are an array `[4, g]`; those of R requests are stacked `[R, 4, g]` and worked on together, since a policy is asked
between two steps of an engine and must not make it wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PRIOR_ROUNDS = 4.0  # rounds that the prior is worth


def stacked(tallies: Sequence[Floats | None], width: int) -> Floats:
    """`[R, 4, width]`; None is a request without rounds, and shorter or longer tallies are fitted."""
    empty = np.zeros((4, width))
    fitted = [empty if t is None else t if t.shape[1] == width else _fit(t, width) for t in tallies]
    return np.stack(fitted) if fitted else np.zeros((0, 4, width))


def add_rounds(tallies: Floats, submitted: Ints, accepted: Ints, confidences: Floats, believed: Floats, *, keep: float) -> Floats:
    """Add a round to each request; earlier ones weigh `keep` times what they did.

    Position j of a round counts where it was verified and the drafts before it stood: then it stood or fell by itself. Drafts that
    were not verified count by what is believed of them, else a request whose drafts are never worth it would be drafted for forever.
    All of it is past, so whatever is decided from it about the next drafts depends on the text so far alone.

    Args:
        tallies: `[R, 4, g]`: drafts that stood; that were tried; of those with confidences the sum of these; and how many of them stood.
        submitted, accepted: `[R]` drafts verified, and how many of them stood.
        confidences: `[R, g]`, NaN where there are none.
        believed: `[R, g]` the same, lowered by `trust`.
    """
    position = np.arange(tallies.shape[2])
    stood = position < accepted[:, None]
    tried = position < np.minimum(submitted, accepted + 1)[:, None]
    said = tried & ~np.isnan(confidences)
    guessed = (position >= submitted[:, None]) & ~np.isnan(believed)
    rows = [np.where(guessed, believed, stood), tried | guessed, np.where(said, confidences, 0.0), stood & said]
    return tallies * keep + np.stack(rows, axis=1)


def rates(tallies: Floats, prior: Floats) -> Floats:
    """`[R, g]` probabilities that draft j stands given that those before it do; `prior` `[g]` is what is thought without any round."""
    return (tallies[:, 0] + _PRIOR_ROUNDS * prior) / (tallies[:, 1] + _PRIOR_ROUNDS)


def trust(tallies: Floats, prior: Floats) -> Floats:
    """`[R, g]` factors, at most 1, for confidences of position j: below 1 where drafts fell more often than they were said to."""
    return np.minimum(1.0, (tallies[:, 3] + _PRIOR_ROUNDS * prior) / (tallies[:, 2] + _PRIOR_ROUNDS))


def _fit(tallies: Floats, width: int) -> Floats:
    have = tallies[:, :width]
    return np.pad(have, ((0, 0), (0, width - have.shape[1])))
