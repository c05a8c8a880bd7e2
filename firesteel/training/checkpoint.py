"""Resumable checkpoints of a training run, and the best weights so far. Written to a temporary name, then renamed."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from firesteel.artifact import write_atomic
from firesteel.errors import ArtifactError

STATE, BEST = "state.pt", "best.safetensors"


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: optimiser steps taken (skipped ones included).
        batch: batches consumed; with the seed it fixes the next batch and its anchors.
        seconds: wall-clock spent training so far.
        best: best validation acceptance length, 0 before the first validation.
        best_step: the step it was measured at.
        since_best: validations since then.
        skipped: steps skipped for non-finite values.
        last_validation: the step last validated at.
    """

    step: int = 0
    batch: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    since_best: int = 0
    skipped: int = 0
    last_validation: int = -1


def save_state(folder: Path, module: nn.Module, optimizer_state: Any, progress: Progress) -> None:
    """Everything that the next step depends on."""
    buffer = io.BytesIO()
    torch.save({"module": module.state_dict(), "optimizer": optimizer_state, "progress": asdict(progress)}, buffer)
    write_atomic(folder / STATE, buffer.getvalue())


def load_state(folder: Path) -> dict[str, Any] | None:
    """The saved state, or None if there is none.

    Raises:
        ArtifactError: the file is corrupt.
    """
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch raises many kinds for a damaged file
        raise ArtifactError(f"the training checkpoint {path} is corrupt: {e}", mend=f"delete {path} to train from the start") from None


def save_best(folder: Path, module: nn.Module) -> None:
    """The weights with the best validation so far."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in module.state_dict().items()}
    write_atomic(folder / BEST, save(tensors))


def load_best(folder: Path) -> dict[str, Tensor]:
    """The best weights of a run.

    Raises:
        ArtifactError: there are none, or the file is corrupt.
    """
    path = folder / BEST
    try:
        return load_file(path)
    except Exception as e:  # safetensors raises its own error type
        raise ArtifactError(f"cannot read the trained weights {path}: {e}", mend="run the stage train again") from None
