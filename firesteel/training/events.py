"""What happened in a run and what was done about it: one JSON line an event, in `events.jsonl`."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

EVENTS = "events.jsonl"
JOURNAL = "log.md"  # the page about a run (`training.journal`)


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        time: seconds since 1970.
        step: optimiser steps taken by then.
        rule: what noticed it: `spike`, `non-finite`, `falling`, `memorising`, `apart`, `starving`, `server`, `disk`, `checkpoint`, or `run` for begin and end.
        what: what was seen.
        did: what was done about it.
    """

    time: float
    step: int
    rule: str
    what: str
    did: str


class EventLog:
    """Appends events; only rank 0 has one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS

    def add(self, event: Event) -> None:
        """Keep an event. A disk that has no room for it does not stop training."""
        with suppress(OSError), self.path.open("a") as f:
            f.write(json.dumps(asdict(event)) + "\n")


def read_events(folder: Path) -> list[Event]:
    """All whole events of a run; a torn last line is left out."""
    found = []
    try:
        lines = (folder / EVENTS).read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            found.append(Event(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def sentence(event: Event) -> str:
    """An event in words."""
    return f"step {event.step}: {event.what}: {event.did}" if event.did else f"step {event.step}: {event.what}"
