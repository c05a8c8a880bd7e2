"""Dropped: what was left out or altered, counted by reason, with the first example of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Dropped:
    """Counts by reason; nothing is ever left out without standing here.

    Attributes:
        counts: reason -> how often.
        first: reason -> where it happened first, e.g. `chats.jsonl:17`.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Count one row (or one alteration) and remember where the first was."""
        self.counts[reason] += 1
        self.first.setdefault(reason, where)

    def merge(self, other: Dropped) -> None:
        """Add another counter's content; examples already known stay."""
        self.counts.update(other.counts)
        for reason, where in other.first.items():
            self.first.setdefault(reason, where)

    @property
    def total(self) -> int:
        return self.counts.total()

    def lines(self) -> list[str]:
        """One line per reason, most frequent first, e.g. `12 x empty content (first: chats.jsonl:17)`."""
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return [f"{count} x {reason} (first: {self.first[reason]})" for reason, count in ordered]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """For a manifest: reason -> `{"count", "first"}`."""
        return {reason: {"count": count, "first": self.first[reason]} for reason, count in sorted(self.counts.items())}
