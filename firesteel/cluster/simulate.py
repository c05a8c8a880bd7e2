"""A run as discrete events: servers make units of states, links carry them, queues hold them, trainers take them in step.

What a formula of mean rates cannot tell: how often a queue is empty or full, what a server's end costs, what a slow link holds up. A unit is a
document, or several where an hour of documents would be too many (`unit_documents`). Times are seconds, sizes units unless they say otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

_SAMPLES = 2000  # points of the picture


@dataclass(frozen=True)
class Site:
    """A queue with its servers and its link.

    Attributes:
        rates: units a second of each of its servers.
        link: units a second that its link carries; infinite where it does not matter.
        high: units held at most, counted from the moment a server begins one; servers pause above it.
        need: units that its trainer takes for a step.
    """

    rates: tuple[float, ...]
    link: float
    high: int
    need: int


@dataclass(frozen=True)
class Event:
    """A server of a site ends (`fail`) or comes back (`join`) at a time."""

    at: float
    what: str
    site: int
    server: int


@dataclass
class Outcome:
    """What happened in `seconds`.

    Attributes:
        made: units that servers finished; `consumed` by trainers, `queued` at the end, `moving` on a link then, `lost` with a server whose link broke off.
        steps: optimizer steps, by all trainers together.
        waited: share of the time in which the trainers stood still for want of units.
        full: share of servers' time in which they paused, because the queue was full.
        link_busy: the largest share of time that a link was in use.
        down: share of servers' time in which they were down.
        depth: mean units in a queue (ready ones).
        series: (time, least, mean and most units of all queues).
        waits: seconds that each step was waited for.
    """

    seconds: float
    made: int = 0
    consumed: int = 0
    queued: int = 0
    moving: int = 0
    lost: int = 0
    steps: int = 0
    waited: float = 0.0
    full: float = 0.0
    link_busy: float = 0.0
    down: float = 0.0
    depth: float = 0.0
    series: list[tuple[float, float, float, float]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


class _Queue:
    """Units of a site, ready, held (ready, on their way and being made), with time integrals."""

    def __init__(self, env: simpy.Environment, site: Site) -> None:
        self.env, self.site = env, site
        self.ready = self.held = 0
        self.area = self.seen = 0.0
        self.busy = self.free_at = 0.0
        self.room: simpy.Event | None = None

    def change(self, by: int) -> None:
        self.area += self.ready * (self.env.now - self.seen)
        self.seen = self.env.now
        self.ready += by

    def wait_for_room(self) -> simpy.Event:
        if self.room is None:
            self.room = self.env.event()
        return self.room


class Simulation:
    """One run.

    Args:
        sites: queues with their servers.
        step: seconds of a step once all trainers have their units.
        spread: coefficient of variation of a unit's time at a server (0: none, 1: exponential).
        step_spread: the same of a step.
        events: ends and returns of servers.
        failure_every: mean seconds between failures of one server, exponential; None: none by chance.
        repair: seconds that a server is away after one.
        seed: of all chance.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        step: float,
        *,
        spread: float = 0.3,
        step_spread: float = 0.0,
        events: Sequence[Event] = (),
        failure_every: float | None = None,
        repair: float = 300.0,
        seed: int = 0,
    ) -> None:
        self.env = simpy.Environment()
        self.random = random.Random(seed)
        self.step, self.spread, self.step_spread = step, spread, step_spread
        self.failure_every, self.repair = failure_every, repair
        self.queues = [_Queue(self.env, s) for s in sites]
        self.lacking = sum(1 for q in self.queues if q.ready < q.site.need)
        self.complete: simpy.Event | None = None
        self.out = Outcome(0.0)
        self.paused = self.away = self.stood = 0.0
        self.moving = 0
        self.waiting_since: float | None = None
        self.up: dict[tuple[int, int], bool] = {}
        self.wake: dict[tuple[int, int], simpy.Event] = {}
        self.pausing: dict[tuple[int, int], float] = {}
        self.down_since: dict[tuple[int, int], float] = {}
        # A unit that is under way when its server ends is given up: units carry the number of the server's life.
        self.life: dict[tuple[int, int], int] = {}
        for i, site in enumerate(sites):
            for j, rate in enumerate(site.rates):
                self.up[i, j], self.life[i, j] = True, 0
                self.env.process(self._server(i, j, rate))
                if failure_every is not None:
                    self.env.process(self._fails(i, j))
        self.env.process(self._trainers())
        for event in events:
            self.env.process(self._event(event))

    def run(self, seconds: float) -> Outcome:
        """Simulate and count."""
        if self.queues:
            self.env.process(self._watch(seconds))
        self.env.run(until=seconds)
        servers = max(1, len(self.up))
        out, now = self.out, seconds
        out.seconds = seconds
        for queue in self.queues:
            queue.change(0)
        out.queued = sum(q.ready for q in self.queues)
        out.moving = self.moving
        out.depth = sum(q.area for q in self.queues) / now / max(1, len(self.queues))
        out.link_busy = max((q.busy - max(0.0, q.free_at - now)) / now for q in self.queues)
        self.paused += sum(now - since for since in self.pausing.values())
        self.away += sum(now - since for since in self.down_since.values())
        out.full, out.down = self.paused / now / servers, self.away / now / servers
        out.waited = (self.stood + (now - self.waiting_since if self.waiting_since is not None else 0.0)) / now
        return out

    def _draw(self, mean: float, spread: float) -> float:
        """A time with this mean and coefficient of variation, gamma-distributed."""
        if spread == 0:
            return mean
        shape = 1 / spread**2
        return self.random.gammavariate(shape, mean / shape)

    def _server(self, i: int, j: int, rate: float) -> Generator[simpy.Event, Any, None]:
        queue, key, env = self.queues[i], (i, j), self.env
        high, mean, spread, carry = queue.site.high, 1 / rate, self.spread, 1 / queue.site.link
        while True:
            if not self.up[key]:
                self.wake[key] = env.event()
                yield self.wake[key]
                continue
            if queue.held >= high:
                self.pausing[key] = env.now
                yield queue.wait_for_room()
                if key in self.pausing:
                    self.paused += env.now - self.pausing.pop(key)
                continue
            queue.held += 1
            life = self.life[key]
            yield env.timeout(self._draw(mean, spread))
            if self.life[key] != life:
                self._give_back(queue)
                continue
            self.out.made += 1
            if carry == 0:
                self._arrive(queue)
                continue
            start = max(env.now, queue.free_at)
            queue.free_at = start + carry
            queue.busy += carry
            self.moving += 1
            env.process(self._carry(queue, key, life, queue.free_at - env.now))

    def _carry(self, queue: _Queue, key: tuple[int, int], life: int, seconds: float) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(seconds)
        self.moving -= 1
        if self.life[key] != life:  # what its server still held has gone with it
            self.out.lost += 1
            self._give_back(queue)
        else:
            self._arrive(queue)

    def _arrive(self, queue: _Queue) -> None:
        queue.change(1)
        if queue.ready == queue.site.need:
            self.lacking -= 1
            if self.lacking == 0 and self.complete is not None:
                self.complete.succeed()
                self.complete = None

    def _give_back(self, queue: _Queue, count: int = 1) -> None:
        queue.held -= count
        if queue.room is not None and queue.held < queue.site.high:
            queue.room.succeed()
            queue.room = None

    def _trainers(self) -> Generator[simpy.Event, Any, None]:
        env = self.env
        while True:
            asked = env.now
            if self.lacking:
                self.waiting_since = asked
                self.complete = env.event()
                yield self.complete
                self.waiting_since = None
                self.stood += env.now - asked
            self.out.waits.append(env.now - asked)
            for queue in self.queues:
                need = queue.site.need
                queue.change(-need)
                if queue.ready < need:
                    self.lacking += 1
                self.out.consumed += need
                self._give_back(queue, need)
            yield env.timeout(self._draw(self.step, self.step_spread))
            self.out.steps += 1

    def _fails(self, i: int, j: int) -> Generator[simpy.Event, Any, None]:
        assert self.failure_every is not None
        while True:
            yield self.env.timeout(self.random.expovariate(1 / self.failure_every))
            self._set(i, j, up=False)
            yield self.env.timeout(self.repair)
            self._set(i, j, up=True)

    def _event(self, event: Event) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(event.at)
        self._set(event.site, event.server, up=event.what == "join")

    def _set(self, i: int, j: int, *, up: bool) -> None:
        key = (i, j)
        if self.up[key] == up:
            return
        self.up[key] = up
        if up:
            self.away += self.env.now - self.down_since.pop(key)
            if key in self.wake:
                self.wake.pop(key).succeed()
        else:
            self.life[key] += 1
            self.down_since[key] = self.env.now
            if key in self.pausing:
                self.paused += self.env.now - self.pausing.pop(key)

    def _watch(self, seconds: float) -> Generator[simpy.Event, Any, None]:
        while True:
            ready = [q.ready for q in self.queues]
            self.out.series.append((self.env.now, float(min(ready)), sum(ready) / len(ready), float(max(ready))))
            yield self.env.timeout(seconds / _SAMPLES)


def conserved(outcome: Outcome) -> bool:
    """Whether every unit is accounted for: made = consumed + queued + moving + lost."""
    return outcome.made == outcome.consumed + outcome.queued + outcome.moving + outcome.lost
