"""What rank 0 looks at now and then while training goes on: samples that do not come, servers in trouble, a disk that fills."""

from __future__ import annotations

import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firesteel import recipe as recipes
from firesteel.training.events import Event, EventLog, sentence

PERIOD = 10.0  # seconds between looks
_MINUTE = 60.0
_RARER = 4  # times as long between states on a disk that fills
_ENOUGH = 1.2  # sizes of a state that a state and the weights still fit into
_GAP = 0.15  # share of first drafts by which training may be better than validation
_MORE = "prompts of validation's kind help most (prompts.sources: synthesize with like)"
_LESS = "more prompts help most, then train.weight_decay or fewer passes"

Row = dict[str, Any]


class Lookout:
    """Notices by rule, once for each trouble and once when it is over.

    Args:
        log: where events are kept; None on ranks that keep none, and these do not look.
        say: tells the user.
        endpoints: rows of the endpoints that samples come from, see `endpoints.pool.Pool.rows`.
        free: free bytes of the run's disk.

    Attributes:
        rarer: what the time between two states is to be multiplied by.
        full: the disk has room for one more state: save it and stop.
        easier: by how much training was better than validation within the first pass; None where nobody has seen that.
    """

    def __init__(
        self, settings: recipes.Watch, log: EventLog | None, say: Callable[[str], None], endpoints: Callable[[], list[Row]], free: Callable[[], int]
    ) -> None:
        self.settings, self.log, self.say, self.endpoints, self.free = settings, log, say, endpoints, free
        self.rarer, self.full = 1, False
        self._looked = self._minute = time.monotonic()
        self._waited: float | None = None
        self._starving = False
        self._right: deque[float] = deque(maxlen=20)
        self._memorises = self._apart = False
        self.easier: float | None = None
        self._troubled: dict[str, str] = {}  # endpoint -> kind of trouble seen at the last look
        self._told: dict[str, str] = {}  # endpoint -> kind of trouble told

    def tell(self, step: int, rule: str, what: str, did: str) -> None:
        """Keep an event and show it; begin and end of a run are only kept."""
        event = Event(time.time(), step, rule, what, did)
        if self.log is not None:
            self.log.add(event)
        if rule != "run":
            self.say(sentence(event))

    def look(self, step: int, waited: float, state_bytes: int) -> None:
        """See whether it is time, and then what is the matter.

        Args:
            waited: seconds that training has waited for samples so far.
            state_bytes: size of a training state.
        """
        now = time.monotonic()
        if self.log is None or now - self._looked < PERIOD:
            return
        self._looked = now
        self._disk(step, state_bytes)
        rows = self.endpoints()
        self._servers(step, rows)
        if self._waited is None:
            self._waited, self._minute = waited, now
        elif now - self._minute >= _MINUTE:
            share = (waited - self._waited) / (now - self._minute)
            self._waited, self._minute = waited, now
            self._samples(step, share, rows)

    def saw(self, right: float) -> None:
        """Take the share of first drafts that were right in a training step."""
        self._right.append(right)

    def compare(self, step: int, right: float, epoch: float) -> None:
        """See whether training is much better than a validation, in which this share of first drafts was right.

        In the first pass over the documents nothing can be known by heart: there training has the easier ones. What it is further ahead later,
        it has learnt by heart.
        """
        if not self._right:
            return
        known = statistics.fmean(self._right)
        shares = f"the first draft is right for {known:.0%} of training and {right:.0%} of validation"
        if epoch <= 1:
            self.easier = max(0.0, known - right)
            if self.easier > _GAP and not self._apart:
                self._apart = True
                self.tell(step, "apart", f"{shares} within the first pass: training's documents are of another kind", "training goes on; " + _MORE)
        elif self.easier is not None and known - right - self.easier > _GAP and not self._memorises:
            self._memorises = True
            self.tell(step, "memorising", f"{shares}: documents are learnt by heart", "training goes on; " + _LESS)

    def _disk(self, step: int, state_bytes: int) -> None:
        free = self.free()
        if free < _ENOUGH * state_bytes:
            self.full = True
        elif self.rarer == 1 and free < self.settings.disk_states * state_bytes:
            self.rarer = _RARER
            self.tell(
                step, "disk", f"the disk has {free / 1e9:.2f} GB left, a state takes {state_bytes / 1e9:.2f}", f"states are saved {_RARER} times as rarely"
            )
        elif self.rarer > 1 and free > 2 * self.settings.disk_states * state_bytes:
            self.rarer = 1
            self.tell(step, "disk", f"the disk has {free / 1e9:.2f} GB left again", "states are saved as before")

    def _samples(self, step: int, share: float, rows: list[Row]) -> None:
        if rows and not any("://" in row["url"] for row in rows):
            return  # the target in this process: training and it take turns
        if not self._starving and share > self.settings.starving:
            self._starving = True
            up = sum(row["state"] == "up" for row in rows)
            where = f", {up} of {len(rows)} servers up" if rows else ""
            mend = "`firesteel endpoints RECIPE add URL` adds a server" if rows else "the disk that holds the states is slow"
            self.tell(step, "starving", f"training waited for samples {share:.0%} of the last minute{where}", f"it goes on; {mend}")
        elif self._starving and share < self.settings.starving / 2:
            self._starving = False
            self.tell(step, "starving", f"training waited for samples {share:.0%} of the last minute", "enough come again")

    def _servers(self, step: int, rows: list[Row]) -> None:
        """A trouble seen twice in a row is told; so is its end."""
        found = {row["url"]: trouble for row in rows if (trouble := self._trouble(row, rows)) is not None}
        for url, (kind, what) in found.items():
            if self._troubled.get(url) == kind and self._told.get(url) != kind:
                self._told[url] = kind
                self.tell(step, "server", f"{url} {what}", _DONE[kind])
        for url in [u for u in self._told if u not in found and u not in self._troubled]:
            del self._told[url]
            if any(row["url"] == url for row in rows):
                self.tell(step, "server", f"{url} is well again", "it is in full use")
        self._troubled = {url: kind for url, (kind, _) in found.items()}

    def _trouble(self, row: Row, rows: list[Row]) -> tuple[str, str] | None:
        """What is wrong with an endpoint: the kind of trouble, and in words."""
        if row["state"] == "refused":
            return "refused", f"cannot be used: {row['error']}"
        if row["state"] == "late":
            return "late", "takes much longer than is usual"
        if row["state"] != "up":
            return "failing", f"fails: {row['error']}"
        others = [r["tokens_per_second"] for r in rows if r is not row and r["state"] == "up"]
        if others and row["flying"] and row["tokens_per_second"] * self.settings.slow < (usual := statistics.median(others)):
            return "slow", f"gives {row['tokens_per_second']:,.0f} tokens/s, the others {usual:,.0f}"
        return None


_DONE = {
    "refused": "it is left out for good",
    "failing": "it rests, and is tried again ever more rarely",
    "late": "its work went to another server, and it gets no more until it answers",
    "slow": "the others get more",
}


def free_bytes(folder: Path) -> Callable[[], int]:
    """Free bytes of a folder's disk, as a function."""
    return lambda: shutil.disk_usage(folder).free
