"""Policies that follow the machine's costs and the drafts' fortunes: DSpark's scheduler (arXiv 2607.05147) with a mode without drafter.

`policies` says what a policy may look at, `scheduler` why what these two do with confidences is lossless. Everything else they use is
past: acceptance of earlier rounds, seconds of earlier steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firesteel.decoding.outcomes import add_rounds, rates, stacked, trust
from firesteel.decoding.policies import Drafted, Hearing, Request
from firesteel.decoding.scheduler import admit_early_stop, admit_top, best_capacity, worth_drafting
from firesteel.errors import RecipeError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The scheduler's account holds, in steps whose drafts all fall, this much at first and this much at most.
_BEGIN, _MOST = 5.0, 40.0
# The account of drafting and observing prompts together, in steps of one token: at first, and at most.
_BEGIN_HEARING, _MOST_HEARING = 1.0, 10.0
# Share of the time of steps that read prompts which may go into observing them, whatever drafting brings.
_HEARING = 0.015
# Steps for which a decision to draft for nobody stands.
_PAUSE = 3
# Drafts beyond those that are expected to pay.
_AHEAD = 2
# Shares that a round leaves of the weight of earlier ones: of a request the last 14 or so count, of all together the last thousand,
# and of the ratio of measured to profiled seconds the last 50 steps.
_KEEP_OWN, _KEEP_ALL, _KEEP_PACE = 0.93, 0.999, 0.98


class Costs(Protocol):
    """Seconds of a step; `firesteel.decoding.profile.Profile` is the real one."""

    def seconds(self, tokens: ArrayLike, drafting: ArrayLike = 0) -> Floats:
        """Of steps over `tokens` tokens, in which `drafting` requests are drafted for."""
        ...


class Scheduler:
    """DSpark's prefix scheduler (Algorithm 1), with requests that go without the drafter while it does not pay for them.

    Before drafting, the acceptance seen so far says for which requests drafting is expected to pay at the costs of this step: for none
    where the batch is too full, for others than those whose drafts fall. A request without drafter is drafted for again now and then,
    to see. After drafting, Algorithm 1 decides with the drafts' confidences, lowered where they have proven too high; without
    confidences, with the acceptance seen so far.

    Expectations may be wrong, and so may the profile, so an account is kept besides: the seconds that steps with drafts took are set
    against those that the same tokens would have taken without a drafter. Where it is overdrawn nothing is drafted, but for the trials.
    So, whatever drafts and confidences do, the engine loses little more than a share `probe` of its time on them and as much again on
    trials. Where the engine tells no seconds, the profile's stand for them.

    The drafter's observation of prompts costs time, too, whether anything is drafted behind them or not. A second account sets it, and what
    drafting lost, against what drafting gained (and half a `probe`, and 1.5% of the time in which prompts are read); where that is overdrawn, no
    further prompt is observed and so nothing drafted behind it. While nothing is drafted at all, prompts are observed only when drafting begins behind them.

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
        self._all: Floats | None = None  # tallies of all requests together: what a new one is expected to do
        self._account: float | None = None  # seconds; None until there is something to pay for
        self._put_by = 0.0  # seconds that may be spent on trials
        self._token = float(costs.seconds(1))
        self._gained = _BEGIN_HEARING * self._token  # seconds, by drafting, less those for observing prompts
        self._idle = False  # the last time it was asked, nothing was worth drafting
        self._rest = self._resting = 0  # steps for which nothing is asked, with this many requests
        # Measured seconds of steps without and with drafts, as multiples of the profile's: where memory is slow for a while, for one, many tokens
        # cost hardly more than one.
        self._pace = self._pace_drafting = 1.0

    @property
    def hearing(self) -> Hearing:
        if self._gained < 0:
            return "not"
        return "when drafted for" if self._idle else "at once"

    def charge(self, seconds: float, reading: float) -> None:
        self._gained = min(self._gained + _HEARING * reading - seconds, _MOST_HEARING * self._token)

    def plan(self, requests: Sequence[Request]) -> list[int]:
        for r in requests:
            r.probing = False
        if self._rest and self._resting == len(requests):
            self._rest -= 1
            return [0] * len(requests)
        self._rest = 0
        rooms = np.array([r.room for r in requests], dtype=np.int64)
        if not rooms.any():
            return self._pause(len(requests))
        self._idle = not self._could_pay(rooms)
        if self._idle:
            return self._pause(len(requests))
        expected = self._expected(requests, rooms)
        lengths = np.array(self._worth(expected))
        if not self._can_pay(lengths):
            lengths[:] = 0
        self._mark_trials(requests, lengths)
        self._idle = not lengths.any()
        if self._idle and not any(r.probing for r in requests):
            return self._pause(len(requests))
        # Somewhat more than is expected to pay is drafted, and `admit` chooses with confidences.
        return [r.room if r.probing else min(r.room, n + _AHEAD) if n else 0 for r, n in zip(requests, lengths.tolist(), strict=True)]

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        # A trial is verified in full, to learn the most; whether it is one was settled before it was drafted.
        trials = [d.count if r.probing else 0 for r, d in zip(requests, drafts, strict=True)]
        counts = np.array([d.count for d in drafts], dtype=np.int64)
        if not counts.any():
            return [0] * len(requests)
        survival = self._survival(requests, drafts, counts)
        survival[np.array(trials) > 0] = np.nan
        lengths = self._admit(survival, sum(trials), int((counts > 0).sum()))
        return [n or length for n, length in zip(trials, lengths, strict=True)]

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int], seconds: float | None) -> None:
        for r, d in zip(requests, drafts, strict=True):
            r.silent = 0 if d.count else r.silent + 1
        trials = [n for r, n in zip(requests, submitted, strict=True) if r.probing]
        here, tokens, drafting = len(requests), len(requests) + sum(submitted), sum(d.count > 0 for d in drafts)
        profiled = self.costs.seconds([here, tokens - sum(trials), tokens], [0, drafting - len(trials), drafting])
        if not drafting and seconds is not None:
            self._pace = _KEEP_PACE * self._pace + (1 - _KEEP_PACE) * seconds / float(profiled[0])
        elif drafting and seconds is not None:
            self._pace_drafting = _KEEP_PACE * self._pace_drafting + (1 - _KEEP_PACE) * seconds / float(profiled[2])
        plain, untried, took = (self._pace * profiled).tolist()
        took = took if seconds is None else seconds
        if trials:
            self._put_by -= took - untried
        gain = plain * (here + sum(accepted)) / here - took if drafting else 0.0
        if self._account is not None:
            self._account += gain
        self._gained = min(self._gained + gain + 0.5 * self.probe * plain, _MOST_HEARING * self._token)
        drafted = [i for i, d in enumerate(drafts) if d.count]
        if drafted:
            width = max(d.count for d in drafts)
            n, k, own = np.array(submitted)[drafted], np.array(accepted)[drafted], stacked([requests[i].tallies for i in drafted], width)
            said = _confidences([drafts[i] for i in drafted], width)
            believed = self._believed(said, own)
            for i, tallies in zip(drafted, add_rounds(own, n, k, said, believed, keep=_KEEP_OWN), strict=True):
                requests[i].tallies = tallies
            new = add_rounds(np.zeros_like(own), n, k, said, believed, keep=0.0).sum(0)
            self._all = new + _KEEP_ALL ** len(drafted) * stacked([self._all], width)[0]

    def _seconds(self, tokens: ArrayLike, drafting: ArrayLike) -> Floats:
        """The profile's, as this machine keeps it now."""
        return self.costs.seconds(tokens, drafting) * np.where(np.asarray(drafting) > 0, self._pace_drafting, self._pace)

    def _pause(self, requests: int) -> list[int]:
        """Nothing is drafted, and for some steps with as many requests it is not asked again: asking takes a share of a short step."""
        self._rest, self._resting = _PAUSE, requests
        return [0] * requests

    def _worth(self, expected: Floats) -> list[int]:
        """Expected lengths of the requests that are worth drafting for, such as `_admit` would leave them."""
        chosen = np.array(worth_drafting(expected, self._seconds, margin=self.margin))
        drafting = int((chosen > 0).sum())
        if not drafting:
            return chosen.tolist()
        # An early stop may end before a stair of the costs that the search over all lengths has passed.
        left = np.where((chosen > 0)[:, None], expected, np.nan)
        lengths = admit_early_stop(left, lambda tokens: 1.0 / self._seconds(tokens, drafting))
        written = len(left) + float(left[np.arange(left.shape[1]) < np.array(lengths)[:, None]].sum())
        plain, took = self._seconds([len(left), len(left) + sum(lengths)], [0, drafting]).tolist()
        return lengths if written * plain > len(left) * took * (1 + self.margin) else [0] * len(left)

    def _admit(self, survival: Floats, trials: int, drafting: int) -> list[int]:
        # The drafter's time is spent by now, but it is part of every step that is like this one: what counts is tokens per second.
        return admit_early_stop(survival, lambda tokens: 1.0 / self.costs.seconds(tokens + trials, drafting))

    def _could_pay(self, rooms: Ints) -> bool:
        """Drafting would pay for some number of drafts if all of them stood; those of one request after another, which is cheapest."""
        drafting = np.concatenate([[0], np.repeat(np.arange(1, len(rooms) + 1), np.sort(rooms)[::-1])])
        tokens = len(rooms) + np.arange(len(drafting))
        rate = tokens / self._seconds(tokens, drafting)
        return bool(rate.max() > rate[0] * (1 + self.margin))

    def _can_pay(self, lengths: Ints) -> bool:
        """The account could bear it if none of these drafts stood. Its size is bounded both ways in steps like this one."""
        tokens, drafting = len(lengths) + int(lengths.sum()), int((lengths > 0).sum())
        plain, took = (self._pace * self.costs.seconds([len(lengths), tokens], [0, drafting])).tolist()
        if drafting:
            least = took - plain
            self._account = _BEGIN * least if self._account is None else min(self._account, _MOST * least)
        if self._account is not None:
            self._account += self.probe * plain * (1 if drafting else 1 + _PAUSE)
        return self._account is not None and self._account >= took - plain

    def _mark_trials(self, requests: Sequence[Request], lengths: Ints) -> None:
        """Mark the requests that have been silent longest, as many as the time put by for it pays for."""
        silent = [r for r, n in zip(requests, lengths.tolist(), strict=True) if n == 0 and r.room]
        tokens, drafting = len(requests) + int(lengths.sum()), int((lengths > 0).sum())
        for number, r in enumerate(sorted(silent, key=lambda r: -r.silent)):
            now, then = self.costs.seconds([tokens, tokens + r.room], [drafting, drafting + 1]).tolist()
            if number == 0:
                # No more is put by than the first of them costs, and a little for others that hardly add to it (on a stair of the costs).
                left = self._put_by = min(self._put_by + self.probe * now * (1 + _PAUSE * (drafting == 0)), 1.1 * (then - now))
            if left < then - now:
                return
            left -= then - now
            r.probing, tokens, drafting = True, tokens + r.room, drafting + 1

    def _expected(self, requests: Sequence[Request], counts: Ints) -> Floats:
        """`[R, g]` survival that past rounds let expect of `counts` drafts, NaN behind them."""
        width = int(counts.max())
        prior = self._prior[np.minimum(np.arange(width), len(self._prior) - 1)]
        shared = rates(stacked([self._all], width), prior)[0]
        found = rates(stacked([r.tallies for r in requests], width), shared).cumprod(1)
        found[np.arange(width) >= counts[:, None]] = np.nan
        return found

    def _survival(self, requests: Sequence[Request], drafts: Sequence[Drafted], counts: Ints) -> Floats:
        """`[R, g]` survival of the drafts at hand, from their confidences where there are some; NaN behind them."""
        width = int(counts.max())
        found = self._believed(_confidences(drafts, width), stacked([r.tallies for r in requests], width)).cumprod(1)
        without = np.array([d.confidences is None for d in drafts])
        if without.any():
            found[without] = self._expected(requests, counts)[without]
        found[np.arange(width) >= counts[:, None]] = np.nan
        return found

    def _believed(self, said: Floats, tallies: Floats) -> Floats:
        """`[R, g]` confidences, lowered where earlier ones have proven too high."""
        shared = trust(stacked([self._all], said.shape[1]), np.ones(said.shape[1]))[0]
        return np.clip(said * trust(tallies, shared), 0.0, 1.0)


class AsynchronousScheduler(Scheduler):
    """The variant for engines that must fix a step's size before its drafts are known (arXiv 2607.05147).

    The size is the best over all lengths for the drafts of two steps earlier, which also suits costs with stairs; the drafts at hand
    then fill it in descending survival. Lossless because the size does not see them. Until two steps in a row were drafted for, the
    acceptance seen so far stands in.
    """

    def __init__(self, costs: Costs, *, prior: Sequence[float], margin: float = 0.02, probe: float = 0.01) -> None:
        super().__init__(costs, prior=prior, margin=margin, probe=probe)
        self._earlier: deque[int] = deque(maxlen=2)
        self._expected_capacity = 0

    def plan(self, requests: Sequence[Request]) -> list[int]:
        counts = super().plan(requests)
        drafting = sum(n > 0 for n in counts)
        if drafting == 0:
            self._earlier.clear()
        elif len(self._earlier) < 2:
            expected = self._expected(requests, np.array(counts))
            self._expected_capacity = best_capacity(expected, lambda tokens: 1.0 / self.costs.seconds(tokens, drafting))
        return counts

    def _worth(self, expected: Floats) -> list[int]:
        return worth_drafting(expected, self._seconds, margin=self.margin)

    def _admit(self, survival: Floats, trials: int, drafting: int) -> list[int]:
        capacity = self._earlier[0] if len(self._earlier) == 2 else self._expected_capacity
        self._earlier.append(best_capacity(survival, lambda tokens: 1.0 / self.costs.seconds(tokens + trials, drafting)))
        return admit_top(survival, capacity)


def _confidences(drafts: Sequence[Drafted], width: int) -> Floats:
    """`[R, width]`, NaN where there are none."""
    table = np.full((len(drafts), width), np.nan)
    for row, draft in zip(table, drafts, strict=True):
        if draft.confidences is not None:
            row[: draft.count] = draft.confidences[: draft.count]
    return table
