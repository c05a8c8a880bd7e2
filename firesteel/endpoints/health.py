"""One endpoint: what is under way there, and whether it gets more."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

_SPAN = 30.0  # seconds over which an endpoint's speed is taken


@dataclass(eq=False)
class Endpoint:
    """A server as its client knows it. Times are the event loop's, in seconds.

    Attributes:
        url: its name.
        flying: requests under way.
        late: of these, the ones that take much longer than is usual; while there is one the endpoint gets no more.
        failures: in a row, counted once per rest.
        rest_until: it is not asked before then.
        refused: why it is never asked again (a setting is wrong there), or None.
        answers, faults, bad: usable answers, failed requests and unusable answers so far.
        error: what went wrong last.
    """

    url: str
    flying: int = 0
    late: int = 0
    failures: int = 0
    rest_until: float = 0.0
    refused: str | None = None
    answers: int = 0
    faults: int = 0
    bad: int = 0
    error: str = ""
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=512))  # when, tokens
    _failed_at: float = -1.0
    _bad_in_a_row: int = 0

    def room(self, now: float, concurrency: int) -> int:
        """Requests that it may be given now: none while it rests or is late, one to prove itself after a failure."""
        if self.refused is not None or self.late > 0 or now < self.rest_until:
            return 0
        return max(0, (1 if self.failures else concurrency) - self.flying)

    def answered(self, now: float, size: int) -> None:
        """A usable answer of so many tokens: it is in full use again."""
        self.answers += 1
        self._recent.append((now, size))
        self.failures = self._bad_in_a_row = 0
        self.rest_until = 0.0

    def failed(self, now: float, started: float, error: str, first: float, longest: float) -> None:
        """A request that began at `started` failed: rest, `first` seconds and twice as long each time in a row, at most `longest`."""
        self.faults += 1
        self._rest(now, started, error, first, longest)

    def answered_badly(self, now: float, started: float, error: str, first: float, longest: float) -> None:
        """An unusable answer; one alone may be chance, several in a row are its fault."""
        self.bad += 1
        self._bad_in_a_row += 1
        self.error = error
        if self._bad_in_a_row > 1:
            self._rest(now, started, error, first, longest)

    def state(self, now: float) -> str:
        """In a word: up, late, resting, trying or refused."""
        if self.refused is not None:
            return "refused"
        if self.late:
            return "late"
        if now < self.rest_until:
            return "resting"
        return "trying" if self.failures else "up"

    def speed(self, now: float) -> float:
        """Tokens a second that it gave of late."""
        times = [(at, size) for at, size in list(self._recent) if now - at < _SPAN]
        # A full queue, or a young endpoint, knows less than the span.
        span = _SPAN if len(times) < len(self._recent) else now - times[0][0] if times else 0.0
        return sum(size for _, size in times) / span if span > 0 else 0.0

    def row(self, now: float) -> dict[str, Any]:
        """What a list of endpoints shows."""
        facts = {"url": self.url, "state": self.state(now), "flying": self.flying, "answers": self.answers, "faults": self.faults, "bad": self.bad}
        return {**facts, "tokens_per_second": round(self.speed(now), 1), "error": self.refused or self.error}

    def _rest(self, now: float, started: float, error: str, first: float, longest: float) -> None:
        self.error = error
        if started < self._failed_at:
            return  # sent before the last failure: the same one, seen again
        self.failures += 1
        self._failed_at = now
        self.rest_until = now + min(longest, first * 2.0 ** min(30, self.failures - 1))
