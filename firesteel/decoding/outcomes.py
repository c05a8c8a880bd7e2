"""What became of a request's drafts: acceptance rates by position, and how far confidences can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FORGET = 0.93  # share that a round keeps of what earlier ones said: the last 14 or so count
_PRIOR_ROUNDS = 4.0  # rounds that the prior is worth


class Outcomes:
    """Tallies by draft position, each round weighing less as others follow.

    Position j of a round counts where it was verified and the drafts before it stood: then it stood or fell by itself. All of it is
    past, so whatever is decided from it about the next drafts depends on the text so far alone.

    Args:
        keep: share of the tallies that stays when a round is added.
    """

    def __init__(self, keep: float = _FORGET) -> None:
        self._keep = keep
        # Rows: drafts that stood, drafts that were tried, of those with confidences the confidences' sum, and how many of them stood.
        self._tallies: Floats = np.zeros((4, 0))

    def add(self, submitted: int, accepted: int, confidences: Sequence[float] | None) -> None:
        """A round: of `submitted` drafts the first `accepted` stood; the drafter said `confidences` of them."""
        tried = min(submitted, accepted + 1)
        if tried > self._tallies.shape[1]:
            self._tallies = np.pad(self._tallies, ((0, 0), (0, tried - self._tallies.shape[1])))
        self._tallies *= self._keep
        self._tallies[0, :accepted] += 1
        self._tallies[1, :tried] += 1
        if confidences is not None:
            self._tallies[2, :tried] += confidences[:tried]
            self._tallies[3, :accepted] += 1

    def rates(self, prior: Floats) -> Floats:
        """`[g]` probabilities that draft j stands given that those before it do; `prior` `[g]` is what is thought without any round."""
        stood, tried = self._wide(len(prior))[:2]
        return (stood + _PRIOR_ROUNDS * prior) / (tried + _PRIOR_ROUNDS)

    def trust(self, prior: Floats) -> Floats:
        """`[g]` factors, at most 1, for confidences of position j: below 1 where drafts fell more often than they were said to."""
        _, _, said, stood = self._wide(len(prior))
        return np.minimum(1.0, (stood + _PRIOR_ROUNDS * prior) / (said + _PRIOR_ROUNDS))

    def _wide(self, width: int) -> Floats:
        have = self._tallies[:, :width]
        return have if have.shape[1] == width else np.pad(have, ((0, 0), (0, width - have.shape[1])))
