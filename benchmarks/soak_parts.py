"""Parts of soak.py that are not the run itself: what goes wrong and when, how often samples are trained, memory over time and its picture."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

from firesteel.endpoints.roster import Roster
from firesteel.hidden.feed import Fetch, SampleFeed, Work
from firesteel.hidden.sample import HiddenSample
from firesteel.hidden.window import Plan
from firesteel.recipe import Feed

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_PAGE = os.sysconf("SC_PAGE_SIZE")
_NUMBERS = 1 << 22  # samples whose uses are told apart: a fixed piece of memory, so that counting is not what grows
Rows = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Act:
    """Something to do at a second of the run: `kill` and `start` a server, `remove` and `add` its endpoint, `kill` and `start` the master."""

    at: float
    verb: str
    name: str  # `server I` or `master`


def plan_troubles(seconds: float, *, servers: int, kills: int, removals: int, master: bool, down: float) -> list[Act]:
    """What goes wrong in a run, at even distances: servers in turn are killed `kills` times, endpoints in turn are taken off the list `removals` times, the
    master is killed once in the middle. Each comes back after `down` seconds, at the latest half-way to the next trouble."""
    troubles = [(i / max(1, kills), "kill", f"server {i % servers}") for i in range(kills)]
    troubles += [((i + 0.4) / max(1, removals), "remove", f"server {(i + 1) % servers}") for i in range(removals)]
    troubles += [(0.5, "kill", "master")] * master
    step = seconds / (len(troubles) + 1)
    acts: list[Act] = []
    for number, (_, verb, name) in enumerate(sorted(troubles), start=1):
        at = number * step
        acts += [Act(at, verb, name), Act(at + min(down, step / 2), "start" if verb == "kill" else "add", name)]
    return acts


@dataclass
class Numbered(HiddenSample):
    """A sample with the number of its arrival."""

    number: int = -1


class Uses:
    """How often every sample that arrived, and every document, was trained on."""

    def __init__(self, documents: int, budget: int) -> None:
        self.budget, self.arrived, self.over, self.most = budget, 0, 0, 0
        self.documents = [0] * documents
        self._used = bytearray(_NUMBERS)

    def number(self, sample: HiddenSample) -> Numbered:
        self.arrived += 1
        return Numbered(**vars(sample), number=self.arrived - 1)

    def note(self, samples: Sequence[HiddenSample], documents: Sequence[int]) -> None:
        """A batch goes to training."""
        for sample, document in zip(samples, documents, strict=True):
            assert isinstance(sample, Numbered), "every sample was numbered when it came"
            assert sample.number < _NUMBERS, "more samples than are counted"
            self._used[sample.number] += 1
            self.documents[document] += 1
            self.most = max(self.most, self._used[sample.number])
            self.over += self._used[sample.number] == self.budget + 1

    def report(self) -> dict[str, Any]:
        """`max_uses` and `over_budget` of arrived samples; `document_uses`: the fewest and most of a document."""
        documents = [min(self.documents), max(self.documents)]
        return {"budget": self.budget, "max_uses": self.most, "over_budget": self.over, "samples": self.arrived, "document_uses": documents}


class CountedFeed(SampleFeed):
    """A feed that counts what it gives to training."""

    def __init__(self, fetch: Fetch, works: Sequence[Work], roster: Roster, settings: Feed, **more: Any) -> None:
        self.uses = Uses(len(works), settings.uses)

        async def numbered(endpoint: str, work: Work) -> HiddenSample:
            return self.uses.number(await fetch(endpoint, work))

        super().__init__(numbered, works, roster, settings, **more)

    def take(self, number: int, plan: Plan) -> list[HiddenSample]:
        samples = super().take(number, plan)
        self.uses.note(samples, plan(number))
        return samples


def resident(pid: int) -> float:
    """Megabytes of memory that a process holds; 0 if it has just gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6
    except (OSError, IndexError):
        return 0.0


def quarters(rows: Rows) -> float:
    """Median of the last quarter over that of the second one; 1 where there is too little to tell."""
    values = [mb for _, mb in rows if mb > 0]
    n = len(values) // 4
    return statistics.median(values[3 * n :]) / statistics.median(values[n : 2 * n]) if n >= 3 else 1.0


def after_start(rows: Rows, events: Sequence[tuple[float, str]], name: str) -> list[tuple[float, float]]:
    """The rows since the longest-lived start of a server (the stretch between two starts with most rows)."""
    cuts = [0.0, *(t for t, what in events if what == f"start {name}"), float("inf")]
    return max(([r for r in rows if low <= r[0] < high] for low, high in pairwise(cuts)), key=len)


def growths(memory: Mapping[str, Rows], events: Sequence[tuple[float, str]]) -> dict[str, float]:
    """By process: memory in the last quarter over that in the second one, of servers and master since their longest-lived start."""
    return {name: quarters(after_start(rows, events, name)) for name, rows in memory.items()}


def plot(memory: Mapping[str, Rows], events: Sequence[tuple[float, str]], path: Path) -> None:
    """Memory over time, troubles as marks."""
    groups = [[n for n in memory if n == "trainer"], [n for n in memory if n.startswith("server")], [n for n in memory if n == "master"]]
    shown = [g for g in groups if g]
    figure, axes = plt.subplots(len(shown), 1, sharex=True, figsize=(9, 3 * len(shown)), squeeze=False)
    for axis, names in zip(axes[:, 0], shown, strict=True):
        for name in names:
            axis.plot([t / 60 for t, _ in memory[name]], [mb for _, mb in memory[name]], ".", markersize=2, label=name)
        axis.set(ylabel="MB", ylim=(0, 1.1 * max((mb for name in names for _, mb in memory[name]), default=1.0)))
        axis.legend(loc="lower right")
        for t, what in events:
            if what.startswith("kill"):
                axis.axvline(t / 60, color="0.6" if "master" in what else "0.9", zorder=0)
    axes[0, 0].set(title="memory; light: a server was killed, dark: the master")
    axes[-1, 0].set(xlabel="minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
