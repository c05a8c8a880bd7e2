"""Metrics of a run: one JSON line per record, mirrored to TensorBoard."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from firesteel.artifact import disk_error, write_atomic

METRICS = "metrics.jsonl"


class MetricsLog:
    """Appends to `metrics.jsonl`; on resume, records after the resumed step are dropped so that the curve has no repeats."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        self.path = folder / METRICS
        kept = [r for r in read_metrics(self.path) if r["step"] <= resume_step]
        write_atomic(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Record `values` (numbers or lists of numbers) of kind `train` or `validation` at `step`.

        Raises:
            ResourceError: the disk is full.
        """
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
            for name, value in values.items():
                if isinstance(value, int | float):
                    # Written by a thread: what this raises is why an earlier one could not be.
                    self._board.add_scalar(f"{kind}/{name}", value, step)
        except OSError as e:
            raise disk_error(e, self.path) from e

    def close(self) -> None:
        """End; what a full disk does not take is lost."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics file; a torn last line (killed while writing) is left out."""
    records = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    return records
