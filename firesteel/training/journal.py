"""One page about a training run: what happened, and what was done about it. For who did not watch."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from firesteel.training.events import Event, read_events
from firesteel.training.metrics import METRICS, read_metrics

_VALIDATIONS, _EVENTS = 12, 40  # rows of a page at most


def journal(folder: Path, title: str) -> str:
    """The page, in Markdown, from what the run has left in its folder: metrics and events."""
    events, records = read_events(folder), read_metrics(folder / METRICS)
    steps = [r for r in records if r["kind"] == "train"]
    text = [f"# What happened: {title}", ""]
    if steps:
        last = steps[-1]
        waited = f", of which {last['waited'] / 60:.1f} waiting for samples since the last start" if last.get("waited", 0) > 1 else ""
        text += [f"{last['step']:,} steps in {last['seconds'] / 60:.1f} minutes{waited}; loss {last['loss']:.3f} at the end.", ""]
    counts = Counter(e.rule for e in events if e.rule != "run")
    alarms = ", ".join(f"{n} {rule}" for rule, n in sorted(counts.items())) or "none"
    starts = sum(e.rule == "run" and e.what.startswith(("training begins", "training goes on")) for e in events)
    text += [f"Started {starts} time(s). Alarms: {alarms}.", ""]
    text += _validations([r for r in records if r["kind"] == "validation"])
    text += _events(events)
    return "\n".join(text) + "\n"


def _validations(found: list[dict[str, float]]) -> list[str]:
    if not found:
        return []
    every = -(-len(found) // _VALIDATIONS)
    shown = found[::-1][::every][::-1]  # the last one always
    rows = [f"| {int(r['step']):,} | {r['seconds'] / 60:.1f} | {r['loss']:.3f} | {r['acceptance_length']:.3f} |" for r in shown]
    return ["| step | minutes | validation loss | acceptance length |", "|---|---|---|---|", *rows, ""]


def _events(events: list[Event]) -> list[str]:
    shown = events if len(events) <= _EVENTS else [*events[: _EVENTS // 2], *events[-(_EVENTS // 2) :]]
    rows = [f"| {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(e.time))} | {e.step:,} | {e.rule} | {_cell(e.what)} | {_cell(e.did)} |" for e in shown]
    left = len(events) - len(shown)
    if left:
        rows.insert(_EVENTS // 2, f"| | | | {left} more, in events.jsonl | |")
    return ["| time (UTC) | step | what | seen | done |", "|---|---|---|---|---|", *rows]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
