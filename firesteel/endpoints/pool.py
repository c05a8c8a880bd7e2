"""A pool of endpoints that answers jobs: the oldest job first, by whoever has room.

What goes wrong is told apart by the exception that `ask` raises:

- `HiddenStateError` or `DataError`: an answer came and cannot be used. It is asked again, elsewhere if there is an elsewhere.
  A job has `retries` of these, and of the last 200 answers no more than `bad_share` may be bad.
- `RefusedError`: the endpoint is well and will never do this job. The others are asked, once each; when all that are well have
  refused it, whoever waits for the job gets the error, and the pool goes on.
- `RecipeError`: this endpoint will never answer (it serves another model). It is left out; when all are, the pool stops.
- anything else, a timeout too: the endpoint failed. It rests, twice as long each time in a row, then one job tries it. Such
  a failure counts against the job only if the endpoint was well when it got the job, and others were answered since the
  job's last failure: an outage is no job's fault, and has a budget of its own (`outage`, seconds without a usable answer).

A request that takes `late_factor` times as long as is usual is given to another endpoint as well; the first answer
counts, and the late endpoint gets nothing new until it has answered. Nothing is cancelled before its timeout, because
an answer that nobody waits for may still have to be taken away at the far end.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from firesteel.endpoints.health import Endpoint
from firesteel.endpoints.roster import Roster
from firesteel.errors import DataError, FiresteelError, HiddenStateError, RecipeError, TargetError
from firesteel.recipe import Endpoints

J = TypeVar("J")
R = TypeVar("R")
_RECENT = 200  # answers over which the share of bad ones is taken
_PACES, _FEWEST_PACES = 64, 8  # requests that say what is usual, and how many it takes
_TICK, _REPORT = 0.25, 5.0  # seconds between looks at what is under way and at the list of endpoints, and between reports
_SHORTEST = 0.25  # seconds in which no request is late


class RefusedError(DataError):
    """An endpoint that is well refuses a job: it is the job's fault."""


@dataclass
class Counts:
    """What a pool has seen: usable answers, failed requests, unusable answers, late requests, answers that came twice."""

    answers: int = 0
    faults: int = 0
    bad: int = 0
    late: int = 0
    twice: int = 0


@dataclass(eq=False)
class _Job(Generic[J, R]):
    order: int
    payload: J
    size: int
    name: str
    future: asyncio.Future[R]
    flying: int = 0
    queued: bool = True
    failures: int = 0  # that count against it
    tries: int = 0  # failed requests, whoever's fault
    seen: int = -1  # answers of the pool at its last failure
    refusals: dict[str, RefusedError] = field(default_factory=dict)  # by endpoint


@dataclass(eq=False)
class _Flight(Generic[J, R]):
    endpoint: Endpoint
    job: _Job[J, R]
    started: float
    trial: bool  # the endpoint had failed, and this was to show whether it is back
    late: bool = False
    landed: bool = False


@dataclass(eq=False)
class Pool(Generic[J, R]):
    """Belongs to the event loop that `start` is called in; nothing here may be called from elsewhere.

    Attributes:
        ask: answers a job at an endpoint, or raises (see the module's head).
        roster: the endpoints.
        settings: budgets and times.
        what: a job, in a word, for errors.
    """

    ask: Callable[[str, J], Awaitable[R]]
    roster: Roster
    settings: Endpoints
    what: str
    counts: Counts = field(default_factory=Counts)
    error: Exception | None = None
    _endpoints: dict[str, Endpoint] = field(default_factory=dict)
    _queue: list[_Job[J, R]] = field(default_factory=list)
    _jobs: set[_Job[J, R]] = field(default_factory=set)
    _flights: dict[asyncio.Task[None], _Flight[J, R]] = field(default_factory=dict)
    _verdicts: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _paces: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_PACES))
    _submitted: int = 0
    _answered_at: float = 0.0
    _last_error: str = "none was given an answer to give"
    _kicked: bool = False

    def start(self) -> None:
        """Begin to watch the list of endpoints."""
        self._loop = asyncio.get_running_loop()
        self._answered_at = self._loop.time()
        self._reread()
        self._watch = self._loop.create_task(self._tick())

    async def close(self) -> None:
        """End everything that is under way; what is still waited for is cancelled."""
        self._watch.cancel()
        for task in self._flights:
            task.cancel()
        await asyncio.gather(self._watch, *self._flights, return_exceptions=True)
        for job in self._jobs:
            job.future.cancel()
        self._report()

    def submit(self, payload: J, *, size: int, name: str) -> asyncio.Future[R]:
        """Ask for an answer; earlier jobs come first. Cancel the future to give it up.

        Args:
            size: how much work it is, against other jobs (tokens).
            name: names it in errors.

        Raises:
            FiresteelError: the pool has stopped. The future's is this error, too, or `RefusedError`.
        """
        if self.error is not None:
            raise self.error
        if not self._jobs:
            self._answered_at = self._loop.time()  # nothing was wanted until now
        job: _Job[J, R] = _Job(self._submitted, payload, size, name, self._loop.create_future())
        self._submitted += 1
        self._jobs.add(job)
        job.future.add_done_callback(lambda _: self._jobs.discard(job))
        self._queue.append(job)
        self._kick()
        return job.future

    def rows(self) -> list[dict[str, Any]]:
        """The endpoints and how they do. May be asked from any thread."""
        now = self._loop.time()
        return [e.row(now) for e in list(self._endpoints.values())]

    def fail(self, error: Exception) -> None:
        """Stop: everyone who waits gets this error, and everyone who asks."""
        if self.error is None:
            self.error = error
            for job in [j for j in self._jobs if not j.future.done()]:
                job.future.set_exception(error)
                job.future.exception()  # so that nobody need look at each
        self._queue.clear()

    def _kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._kicked = False
        for job in self._queue:
            if self._refused_by_all(job) and not job.future.done():
                job.future.set_exception(list(job.refusals.values())[-1])
        self._queue = [job for job in self._queue if not job.future.done()]
        now = self._loop.time()
        while (chosen := self._choose(now)) is not None:
            endpoint, job = chosen
            self._queue.remove(job)
            job.queued = False
            job.flying += 1
            endpoint.flying += 1
            flight = _Flight(endpoint, job, now, bool(endpoint.failures))
            task = self._loop.create_task(self._request(flight))
            self._flights[task] = flight
            task.add_done_callback(self._ended)

    def _choose(self, now: float) -> tuple[Endpoint, _Job[J, R]] | None:
        """Who is given what next."""
        # One that must prove itself goes first; else whoever is least busy.
        free = [e for e in self._endpoints.values() if e.room(now, self.settings.concurrency)]
        for endpoint in sorted(free, key=lambda e: (not e.failures, e.flying)):
            todo = (job for job in self._queue if endpoint.url not in job.refusals)
            # Its trial is the job that failed least, so that one job that kills servers does not keep them down; of these, the one that can wait longest.
            job = min(todo, key=lambda j: (j.tries, -j.order), default=None) if endpoint.failures else next(todo, None)
            if job is not None:
                return endpoint, job
        return None

    def _refused_by_all(self, job: _Job[J, R]) -> bool:
        """No endpoint that is well is left to ask. One that has failed is not waited for: it may never be back."""
        well = [e.url for e in self._endpoints.values() if e.refused is None and not e.failures]
        return bool(job.refusals and self._endpoints) and all(url in job.refusals for url in well)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._flights[task]
        if not task.cancelled() and (error := task.exception()) is not None:  # a mistake in here: nobody else would hear of it
            self.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _request(self, flight: _Flight[J, R]) -> None:
        endpoint, job, error = flight.endpoint, flight.job, None
        try:
            async with asyncio.timeout(self.settings.timeout):
                answer = await self.ask(endpoint.url, job.payload)
        except Exception as e:  # whatever a client or a server comes up with
            error = e
        finally:
            flight.landed = True  # its task ends a moment later
            endpoint.late -= flight.late
            endpoint.flying -= 1
            job.flying -= 1
        if error is None:
            self._answered(endpoint, job, answer, self._loop.time() - flight.started)
        else:
            self._failed(flight, error)
        self._kick()

    def _answered(self, endpoint: Endpoint, job: _Job[J, R], answer: R, seconds: float) -> None:
        self._answered_at = now = self._loop.time()
        self._paces.append((seconds, seconds / max(1, job.size)))
        self._verdicts.append(False)
        endpoint.answered(now, job.size)
        self.counts.answers += 1
        if job.future.done():
            self.counts.twice += 1
        else:
            job.future.set_result(answer)

    def _failed(self, flight: _Flight[J, R], error: Exception) -> None:
        endpoint, job, started = flight.endpoint, flight.job, flight.started
        now, s = self._loop.time(), self.settings
        job.tries += 1
        text = _words(error, s.timeout)
        self._last_error = f"{endpoint.url}: {text}"
        if isinstance(error, RefusedError):
            self._answered_at = now
            endpoint.failures, endpoint.rest_until, endpoint.error = 0, 0.0, text
            job.refusals[endpoint.url] = error
        elif isinstance(error, HiddenStateError | DataError):
            self.counts.bad += 1
            self._verdicts.append(True)
            endpoint.answered_badly(now, started, text, s.backoff, s.backoff_max)
            job.failures += 1
            if sum(self._verdicts) > s.bad_share * _RECENT:
                self.fail(_stop(error, f"{sum(self._verdicts)} of the last {len(self._verdicts)} answers are unusable; the last: {self._last_error}", None))
        elif isinstance(error, RecipeError):
            endpoint.refused = text
            if self._endpoints and all(e.refused is not None for e in self._endpoints.values()):
                self.fail(error)
        else:
            self.counts.faults += 1
            endpoint.failed(now, started, text, s.backoff, s.backoff_max)
            if self.counts.answers > job.seen and not flight.trial:
                job.failures += 1
            job.seen = self.counts.answers
        if endpoint.rest_until > now:
            self._loop.call_later(endpoint.rest_until - now, self._kick)
        if job.failures > s.retries and not job.future.done():
            self.fail(_stop(error, f"{self.what} {job.name} failed {job.failures} times; the last: {self._last_error}", "retries"))
        if job.flying == 0:
            self._requeue(job)

    def _requeue(self, job: _Job[J, R]) -> None:
        if not job.future.done() and not job.queued:
            job.queued = True
            insort(self._queue, job, key=lambda j: j.order)
            self._kick()

    def _late_after(self, size: int) -> float | None:
        """Seconds after which a request is late: a multiple of the usual time, of requests or of their tokens, whichever is longer."""
        if self.settings.late_factor is None or len(self._paces) < _FEWEST_PACES:
            return None
        seconds, per_token = (statistics.median(column) for column in zip(*self._paces, strict=True))
        return max(_SHORTEST, self.settings.late_factor * max(seconds, per_token * size))

    def _find_late(self) -> None:
        now = self._loop.time()
        for flight in self._flights.values():
            after = self._late_after(flight.job.size)
            if after is not None and not flight.late and not flight.landed and now - flight.started > after:
                flight.late = True
                flight.endpoint.late += 1
                self.counts.late += 1
                self._requeue(flight.job)

    async def _tick(self) -> None:
        reported, outage = self._loop.time(), self.settings.outage
        while self.error is None:
            await asyncio.sleep(min(_TICK, outage / 4))
            self._reread()
            self._find_late()
            now = self._loop.time()
            if self._jobs and now - self._answered_at > outage:
                last = self._last_error if self._endpoints else f"{self.roster.where} names no endpoint"
                first, others = min(self._jobs, key=lambda j: j.order), len(self._jobs) - 1
                waiting = f"{self.what} {first.name}" + (f" and {others} others wait" if others else " waits")
                self.fail(TargetError(f"no usable answer for {now - self._answered_at:.0f} s: {waiting}; the last error: {last}", mend=self._mend))
            elif now - reported > _REPORT:
                reported = now
                self._report()

    def _reread(self) -> None:
        urls = self.roster.read()
        if list(self._endpoints) != urls:
            self._endpoints = {url: self._endpoints.get(url) or Endpoint(url) for url in urls}
            self._kick()

    def _report(self) -> None:
        with contextlib.suppress(FiresteelError):  # a full disk stops whoever has something to keep, not a notice
            self.roster.report(self.rows())

    @property
    def _mend(self) -> str:
        return f"look at the servers named in {self.roster.where}; the same command resumes where this one stopped"


def _words(error: Exception, timeout: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {timeout:g} s"
    return error.message if isinstance(error, FiresteelError) else f"{type(error).__name__}: {error}".rstrip(": ")


def _stop(last: Exception, message: str, setting: str | None) -> FiresteelError:
    kind = type(last) if isinstance(last, HiddenStateError | DataError) else TargetError
    said = last.mend if isinstance(last, FiresteelError) else None
    return kind(message, mend=said or (f"look at the server's log; the setting `{setting}` allows more" if setting else "look at the servers' logs"))
