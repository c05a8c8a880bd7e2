"""What a training process says of itself while it runs: a small file that `firesteel status` reads, and metrics for Prometheus."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from firesteel.artifact import write_atomic
from firesteel.errors import FiresteelError, RecipeError

STATUS = "status"  # folder of a training run with a file for each rank
EVERY = 5.0  # seconds between files
_SPAN = 30.0  # seconds over which rates are taken
_STALE = 60.0  # seconds after which what a rank said of its servers is no news
_ADDED = ("flying", "answers", "faults", "bad", "tokens_per_second")

# Name, kind, field of the status, help.
_METRICS = (
    ("step", "gauge", "step", "Optimiser steps taken."),
    ("progress_ratio", "gauge", "done", "Share of the budget that is used."),
    ("loss", "gauge", "loss", "Loss of the last step."),
    ("acceptance_length", "gauge", "validation", "Acceptance length at the last validation."),
    ("best_acceptance_length", "gauge", "best", "Best acceptance length at a validation."),
    ("tokens", "counter", "tokens", "Tokens of the batches that this process has trained on since it began."),
    ("tokens_per_second", "gauge", "tokens_per_second", "The same, a second, of late."),
    ("waited_seconds", "counter", "waited", "Seconds that this process has waited for samples since it began."),
    ("nonfinite_steps", "counter", "skipped", "Steps skipped because they were not finite."),
    ("spiked_steps", "counter", "spiked", "Steps skipped because their loss was far above the usual."),
    ("returns", "counter", "returns", "Times that training went back to its last good state."),
    ("learning_rate_scale", "gauge", "rate", "What learning rates are multiplied by since then."),
    ("checkpoint_step", "gauge", "state_step", "Step of the last training state that is whole on disk."),
    ("held_tokens", "gauge", "held", "Tokens of samples that the feed holds or has asked for."),
    ("remaining_seconds", "gauge", "eta", "Estimate of the seconds that training still takes."),
)
_ENDPOINT = (
    ("answers", "counter", "Usable answers of an endpoint."),
    ("faults", "counter", "Failed requests of an endpoint."),
    ("bad", "counter", "Unusable answers of an endpoint."),
    ("tokens_per_second", "gauge", "Tokens a second that an endpoint has given of late."),
)


class Status:
    """What one rank says of itself.

    Args:
        folder: the training run's.
        rank: this process's number, of `size`.
        endpoints: rows of the endpoints that it asks, see `endpoints.pool.Pool.rows`.
    """

    def __init__(self, folder: Path, rank: int, size: int, endpoints: Callable[[], list[dict[str, Any]]]) -> None:
        self.path = folder / STATUS / f"{rank}.json"
        self.values: dict[str, Any] = {"rank": rank, "size": size, "host": socket.gethostname(), "pid": os.getpid(), "tokens": 0}
        self.endpoints = endpoints
        self._recent: deque[tuple[float, int]] = deque()
        self._written = 0.0

    def update(self, tokens: int, values: dict[str, Any]) -> None:
        """Take what a step has changed; `tokens` are those of its batches here. Writes the file when it is time."""
        now = time.monotonic()
        self.values |= values
        self.values["tokens"] += tokens
        self._recent.append((now, self.values["tokens"]))
        while len(self._recent) > 2 and now - self._recent[0][0] > _SPAN:
            self._recent.popleft()
        began, then = self._recent[0]
        self.values["tokens_per_second"] = (self.values["tokens"] - then) / (now - began) if now > began else 0.0
        done = self.values["done"]
        self.values["eta"] = self.values["seconds"] * (1 - done) / done if done else None
        if now - self._written >= EVERY:
            self._written = now
            self.write()

    def write(self) -> None:
        """Leave the file; a disk without room for it does not stop training."""
        with suppress(OSError, FiresteelError):
            self.path.parent.mkdir(exist_ok=True)
            write_atomic(self.path, json.dumps({**self.values, "endpoints": self.endpoints(), "time": time.time()}))

    def collect(self) -> Iterable[Metric]:
        """The same for Prometheus."""
        labels = ["rank", "host"]
        mine = [str(self.values["rank"]), self.values["host"]]
        for name, kind, key, text in _METRICS:
            value = self.values.get(key)
            if value is not None:
                family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(f"firesteel_train_{name}", text, labels=labels)
                family.add_metric(mine, value)
                yield family
        rows = self.endpoints()
        for name, kind, text in _ENDPOINT:
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(f"firesteel_endpoint_{name}", text, labels=[*labels, "endpoint"])
            for row in rows:
                family.add_metric([*mine, row["url"]], row[name])
            yield family
        up = GaugeMetricFamily("firesteel_endpoint_up", "1 where an endpoint is in full use.", labels=[*labels, "endpoint"])
        for row in rows:
            up.add_metric([*mine, row["url"]], float(row["state"] == "up"))
        yield up


class Metrics:
    """An HTTP server of a process's metrics at `/metrics`, until it is closed.

    Raises:
        RecipeError: the port is taken.
    """

    def __init__(self, status: Status, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(status)  # anything with `collect` will do
        number = port + int(os.environ.get("LOCAL_RANK", "0"))
        try:
            self._server, self._thread = start_http_server(number, host, registry)
        except OSError as e:
            raise RecipeError(f"watch.metrics_port={port}: nothing can listen at {host}:{number}: {e.strerror}", mend="set another port, or none") from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def endpoints_of(ranks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The endpoints of all ranks that have spoken of late, each once: what several ranks counted is added up, and whoever has trouble with one is believed.

    A rank's `age` is that of `read_status`; where it is not known, the rank counts.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in (row for rank in ranks if (rank.get("age") or 0.0) < _STALE for row in rank.get("endpoints", ())):
        known = found.setdefault(row["url"], {**row, **dict.fromkeys(_ADDED, 0)})
        known.update({name: known[name] + row[name] for name in _ADDED})
        if row["state"] != "up":
            known.update(state=row["state"], error=row["error"])
    return list(found.values())


def read_status(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of a training run last said, by rank, each with its `age`: seconds since then, None where that cannot be told.

    Hosts' clocks may be apart, and a file's time may be set by another one than this. So age is the file's own time against that of a file which
    is made now on the same file system.
    """
    found, now = [], _now_at(folder / STATUS)
    for path in (folder / STATUS).glob("[0-9]*.json"):
        with suppress(OSError, ValueError):
            written = path.stat().st_mtime
            found.append({**json.loads(path.read_text()), "age": None if now is None else max(0.0, now - written)})
    return sorted(found, key=lambda row: row["rank"])


def _now_at(folder: Path) -> float | None:
    """The time by the clock of a folder's file system; None where nothing can be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
