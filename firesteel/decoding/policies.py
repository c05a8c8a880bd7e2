"""Policies: how many tokens to draft for each request of a step, and how many of those to verify.

All keep the target's output distribution (arXiv 2607.05147; proven by enumeration in the tests). What they may use:

- before drafting (`plan`): anything that is past. The text so far is given, and whatever the length, a round goes on from it as the
  target would.
- after drafting (`admit`): of a request's draft j whether it is verified may depend on the confidences up to c_j, which are made from
  the tokens before j, and on other requests' drafts admitted before it; never on token j, nor on what comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from firesteel.decoding.verify import verified_length
from firesteel.errors import RecipeError

Floats = NDArray[np.float64]


# When the drafter observes a prompt.
Hearing = Literal["at once", "when drafted for", "not"]


@dataclass
class Request:
    """What a policy knows of one request. The engine makes one per answer and hands it over at every step.

    Attributes:
        room: drafts that this step can use at most; the engine sets it before `plan`.
        tallies: what became of its drafts, `[4, g]` (`outcomes`), or None.
        silent: steps since it was last drafted for.
        probing: it is drafted for to see whether that pays again.
    """

    room: int = 0
    tallies: Floats | None = None
    silent: int = 0
    probing: bool = False


@dataclass(frozen=True)
class Drafted:
    """What was drafted for a request: `count` tokens, with their calibrated confidences if the drafter has any."""

    count: int
    confidences: Sequence[float] | None = None


class LengthPolicy(Protocol):
    """Asked three times a step, about all requests of it at once and in the same order."""

    @property
    def hearing(self) -> Hearing:
        """When the drafter is to observe a prompt: `not` while that has cost more than drafting brings, so that nothing is drafted behind it either."""
        ...

    def charge(self, seconds: float, reading: float) -> None:
        """What the observation of prompts took in a step, which is no part of the seconds that `learn` is told; and the step, where it read prompts."""
        ...

    def plan(self, requests: Sequence[Request]) -> list[int]:
        """Tokens to draft for each, at most its `room`; 0: its step goes without the drafter."""
        ...

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        """Drafts to verify for each, at most its `count`."""
        ...

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int], seconds: float | None) -> None:
        """What became of the step: drafts verified and accepted of each, and how long it took, drafting included (None: not told)."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """Draft and verify the same number of tokens in every round, as far as there is room."""

    tokens: int

    @property
    def hearing(self) -> Hearing:
        return "at once"

    def charge(self, seconds: float, reading: float) -> None:
        pass

    def plan(self, requests: Sequence[Request]) -> list[int]:
        return [min(self.tokens, r.room) for r in requests]

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        return [d.count for d in drafts]

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int], seconds: float | None) -> None:
        pass


@dataclass(frozen=True)
class StaticThreshold:
    """Draft as far as there is room, verify the prefix whose product of confidences stays at or above a threshold.

    Raises:
        RecipeError: from `admit`, where the drafter has no confidences.
    """

    threshold: float

    @property
    def hearing(self) -> Hearing:
        return "at once"

    def charge(self, seconds: float, reading: float) -> None:
        pass

    def plan(self, requests: Sequence[Request]) -> list[int]:
        return [r.room for r in requests]

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        lengths = []
        for draft in drafts:
            if draft.count and draft.confidences is None:
                raise RecipeError(
                    "a confidence threshold needs a drafter with a confidence head", mend="use another policy, or train with drafter.confidence_head=true"
                )
            lengths.append(verified_length(draft.confidences or (), self.threshold))
        return lengths

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int], seconds: float | None) -> None:
        pass
