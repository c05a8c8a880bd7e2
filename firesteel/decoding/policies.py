"""Policies: how many tokens to draft for each request of a step, and how many of those to verify.

All keep the target's output distribution (arXiv 2607.05147; proven by enumeration in the tests). What they may use:

- before drafting (`plan`): anything that is past. The text so far is given, and whatever the length, a round goes on from it as the
  target would.
- after drafting (`admit`): of a request's draft j whether it is verified may depend on the confidences up to c_j, which are made from
  the tokens before j, and on other requests' drafts admitted before it; never on token j, nor on what comes after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firesteel.decoding.outcomes import Outcomes
from firesteel.decoding.scheduler import admit_early_stop, admit_top, best_capacity, worth_drafting
from firesteel.decoding.verify import verified_length
from firesteel.errors import RecipeError

Floats = NDArray[np.float64]

# The scheduler's account holds, in steps whose drafts all fall, this much at first and this much at most.
_BEGIN, _MOST = 8.0, 40.0


@dataclass
class Request:
    """What a policy knows of one request. The engine makes one per answer and hands it over at every step.

    Attributes:
        room: drafts that this step can use at most; the engine sets it before `plan`.
        outcomes: what became of its drafts.
        silent: steps since it was last drafted for.
        probing: it is drafted for to see whether that pays again.
    """

    room: int = 0
    outcomes: Outcomes = field(default_factory=Outcomes)
    silent: int = 0
    probing: bool = False


@dataclass(frozen=True)
class Drafted:
    """What was drafted for a request: `count` tokens, with their calibrated confidences if the drafter has any."""

    count: int
    confidences: Sequence[float] | None = None


class Costs(Protocol):
    """Seconds of a step; `firesteel.decoding.profile.Profile` is the real one."""

    def seconds(self, tokens: ArrayLike, drafting: ArrayLike = 0) -> Floats:
        """Of steps over `tokens` tokens, in which `drafting` requests are drafted for."""
        ...


class LengthPolicy(Protocol):
    """Asked three times a step, about all requests of it at once and in the same order."""

    def plan(self, requests: Sequence[Request]) -> list[int]:
        """Tokens to draft for each, at most its `room`; 0: its step goes without the drafter."""
        ...

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        """Drafts to verify for each, at most its `count`."""
        ...

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int]) -> None:
        """What became of the step: drafts verified and accepted of each."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """Draft and verify the same number of tokens in every round, as far as there is room."""

    tokens: int

    def plan(self, requests: Sequence[Request]) -> list[int]:
        return [min(self.tokens, r.room) for r in requests]

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        return [d.count for d in drafts]

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int]) -> None:
        pass


@dataclass(frozen=True)
class StaticThreshold:
    """Draft as far as there is room, verify the prefix whose product of confidences stays at or above a threshold.

    Raises:
        RecipeError: from `admit`, where the drafter has no confidences.
    """

    threshold: float

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

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int]) -> None:
        pass


class Scheduler:
    """DSpark's prefix scheduler (Algorithm 1), with requests that go without the drafter while it does not pay for them.

    Before drafting, the acceptance seen so far says for which requests drafting is expected to pay at the costs of this step: for none
    where the batch is too full, for others than those whose drafts fall. A request without drafter is drafted for again now and then,
    to see. After drafting, Algorithm 1 decides with the drafts' confidences, lowered where they have proven too high; without
    confidences, with the acceptance seen so far.

    Expectations may be wrong, so an account is kept besides: the seconds that steps with drafts took are set against those that the
    same tokens would have taken without a drafter. Where it is overdrawn nothing is drafted, but for the trials. So, whatever drafts
    and confidences do, the engine loses little more than a share `probe` of its time on them and as much again on trials (by the
    given costs; how true those are is another question).

    Args:
        costs: what steps cost on this machine.
        prior: probabilities that draft j stands given that those before it do, j = 1, 2, ... (the last holds for all further ones);
            the evaluation's report has them. What is assumed until rounds have been seen.
        margin: draft only where that is expected to be faster than no drafting by this share.
        probe: share of the time of steps that may go into trying again, and into being wrong.

    Raises:
        RecipeError: the prior is empty or no probabilities.
    """

    def __init__(self, costs: Costs, *, prior: Sequence[float], margin: float = 0.02, probe: float = 0.01) -> None:
        if not prior or not all(0 <= p <= 1 for p in prior):
            raise RecipeError(f"prior={list(prior)} must be one or more probabilities", mend="give the acceptance rates of the drafted positions")
        self.costs, self.margin, self.probe = costs, margin, probe
        self._prior = np.array(prior, dtype=np.float64)
        self._all = Outcomes(keep=0.999)  # of all requests: what a new one is expected to do
        self._account: float | None = None  # seconds; None until there is something to pay for

    def plan(self, requests: Sequence[Request]) -> list[int]:
        for r in requests:
            r.probing = False
        if not requests or not self._could_pay([r.room for r in requests]):
            return [0] * len(requests)
        expected = [self._rates(r).cumprod().tolist() for r in requests]
        lengths = self._worth(expected)
        if not self._can_pay(lengths):
            lengths = [0] * len(requests)
        self._mark_trial(requests, lengths)
        # All that fits is drafted: a block costs the same at any length, and `admit` chooses with confidences.
        return [r.room if n or r.probing else 0 for r, n in zip(requests, lengths, strict=True)]

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        # A trial is verified in full, to learn the most; whether it is one was settled before it was drafted.
        trials = [d.count if r.probing else 0 for r, d in zip(requests, drafts, strict=True)]
        survival = [[] if n else self._survival(r, d) for r, d, n in zip(requests, drafts, trials, strict=True)]
        lengths = self._admit(survival, sum(trials), sum(d.count > 0 for d in drafts))
        return [n or length for n, length in zip(trials, lengths, strict=True)]

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int]) -> None:
        for r, d, n, k in zip(requests, drafts, submitted, accepted, strict=True):
            r.silent = 0 if d.count else r.silent + 1
            if n:
                r.outcomes.add(n, k, d.confidences)
                self._all.add(n, k, d.confidences)
        if self._account is not None and any(d.count for d in drafts):
            written, tokens = len(requests) + sum(accepted), len(requests) + sum(submitted)
            plain, took = self.costs.seconds([len(requests), tokens], [0, sum(d.count > 0 for d in drafts)]).tolist()
            self._account += plain * written / len(requests) - took

    def _worth(self, expected: list[list[float]]) -> list[int]:
        """Expected lengths of the requests that are worth drafting for, such as `_admit` would leave them."""
        chosen = worth_drafting(expected, self.costs.seconds, margin=self.margin)
        drafting = sum(n > 0 for n in chosen)
        # An early stop may end before a stair of the costs that the search over all lengths has passed.
        lengths = admit_early_stop([e if n else [] for e, n in zip(expected, chosen, strict=True)], lambda tokens: 1.0 / self.costs.seconds(tokens, drafting))
        written = len(expected) + sum(sum(e[:n]) for e, n in zip(expected, lengths, strict=True))
        plain, took = self.costs.seconds([len(expected), len(expected) + sum(lengths)], [0, drafting]).tolist()
        return lengths if written * plain > len(expected) * took * (1 + self.margin) else [0] * len(expected)

    def _admit(self, survival: Sequence[Sequence[float]], trials: int, drafting: int) -> list[int]:
        # The drafter's time is spent by now, but it is part of every step that is like this one: what counts is tokens per second.
        return admit_early_stop(survival, lambda tokens: 1.0 / self.costs.seconds(tokens + trials, drafting))

    def _could_pay(self, rooms: Sequence[int]) -> bool:
        """Drafting would pay for some number of drafts if all of them stood; those of one request after another, which is cheapest."""
        ordered = sorted(rooms, reverse=True)
        drafting = np.concatenate([[0], np.repeat(np.arange(1, len(rooms) + 1), ordered)])
        tokens = len(rooms) + np.arange(len(drafting))
        rate = tokens / self.costs.seconds(tokens, drafting)
        return bool(rate.max() > rate[0] * (1 + self.margin))

    def _can_pay(self, lengths: Sequence[int]) -> bool:
        """The account could bear it if none of these drafts stood. Its size is bounded both ways in steps like this one."""
        tokens, drafting = len(lengths) + sum(lengths), sum(n > 0 for n in lengths)
        plain, took = self.costs.seconds([len(lengths), tokens], [0, drafting]).tolist()
        if drafting:
            least = took - plain
            self._account = _BEGIN * least if self._account is None else min(self._account, _MOST * least)
        if self._account is not None:
            self._account += self.probe * plain
        return self._account is not None and self._account >= took - plain

    def _mark_trial(self, requests: Sequence[Request], lengths: Sequence[int]) -> None:
        """Mark the request that has been silent longest, if the time of steps since then pays for trying all the silent ones in turn."""
        silent = [r for r, n in zip(requests, lengths, strict=True) if n == 0 and r.room]
        if silent:
            tokens, drafting = len(requests) + sum(lengths), sum(n > 0 for n in lengths)
            chosen = max(silent, key=lambda r: r.silent)
            now, then = self.costs.seconds([tokens, tokens + chosen.room], [drafting, drafting + 1]).tolist()
            chosen.probing = chosen.silent * self.probe * now >= (then - now) * len(silent)

    def _rates(self, request: Request) -> Floats:
        prior = self._prior[np.minimum(np.arange(request.room), len(self._prior) - 1)]
        return request.outcomes.rates(self._all.rates(prior))

    def _survival(self, request: Request, draft: Drafted) -> list[float]:
        if draft.count == 0:
            return []
        if draft.confidences is None:
            return [float(s) for s in self._rates(request)[: draft.count].cumprod()]
        trust = request.outcomes.trust(self._all.trust(np.ones(draft.count)))
        said = np.asarray(draft.confidences, dtype=np.float64)[: draft.count]
        return [float(s) for s in np.clip(said * trust, 0.0, 1.0).cumprod()]


class AsynchronousScheduler(Scheduler):
    """The variant for engines that must fix a step's size before its drafts are known (arXiv 2607.05147).

    The size is the best over all lengths for the drafts of two steps earlier, which also suits costs with stairs; the drafts at hand
    then fill it in descending survival. Lossless because the size does not see them. Until two steps in a row were drafted for, the
    acceptance seen so far stands in.
    """

    def __init__(self, costs: Costs, *, prior: Sequence[float], margin: float = 0.02, probe: float = 0.01) -> None:
        super().__init__(costs, prior=prior, margin=margin, probe=probe)
        self._earlier: deque[int] = deque(maxlen=2)
        self._expected = 0

    def plan(self, requests: Sequence[Request]) -> list[int]:
        counts = super().plan(requests)
        drafting = sum(n > 0 for n in counts)
        if drafting == 0:
            self._earlier.clear()
        elif len(self._earlier) < 2:
            expected = [self._rates(r).cumprod()[:n].tolist() for r, n in zip(requests, counts, strict=True)]
            self._expected = best_capacity(expected, lambda tokens: 1.0 / self.costs.seconds(tokens, drafting))
        return counts

    def _worth(self, expected: list[list[float]]) -> list[int]:
        return worth_drafting(expected, self.costs.seconds, margin=self.margin)

    def _admit(self, survival: Sequence[Sequence[float]], trials: int, drafting: int) -> list[int]:
        capacity = self._earlier[0] if len(self._earlier) == 2 else self._expected
        if drafting:
            self._earlier.append(best_capacity(survival, lambda tokens: 1.0 / self.costs.seconds(tokens + trials, drafting)))
        return admit_top(survival, capacity)
