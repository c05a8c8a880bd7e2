"""`evaluate.checkpoints`: exported folders that are measured beside the run's own. They are looked at before anything is spent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from firesteel.artifact import hash_file
from firesteel.errors import CheckpointError
from firesteel.package.export import CONFIG, CONTRACT, WEIGHTS
from firesteel.package.load import check_target, load
from firesteel.stages.line import Line

_T = TypeVar("_T")


def each_checkpoint(line: Line, work: Callable[[Path], _T]) -> dict[str, _T]:
    """What `work` makes of every folder, by name.

    Raises:
        CheckpointError: that of `work`, with the checkpoint's name.
    """
    done: dict[str, _T] = {}
    for name, place in line.recipe.evaluate.checkpoints.items():
        try:
            done[name] = work(Path(place).expanduser())
        except CheckpointError as e:
            mend = f"give a checkpoint for {line.recipe.target.model} in the speculators format (of another layout? firesteel convert {place} NEW_FOLDER)"
            raise CheckpointError(f"evaluate.checkpoints: {name}: {e.message}", mend=mend) from None
    return done


def check_checkpoints(line: Line) -> None:
    """Load each and compare it with the line's target.

    Raises:
        CheckpointError: one is damaged, of another layout, or belongs to another target; names it.
    """
    spec = line.target.spec

    def check(folder: Path) -> None:
        loaded = load(folder)
        check_target(loaded, spec.fingerprint, spec.hidden_size, spec.vocab_size, target_name=spec.name)
        if max(loaded.config.layer_ids) > spec.num_layers:
            raise CheckpointError(f"{folder} reads the states of layers {list(loaded.config.layer_ids)}, {spec.name} has {spec.num_layers} layers")

    each_checkpoint(line, check)


def hash_checkpoints(line: Line) -> dict[str, list[str | None]]:
    """Contents of their files, by name, so that a changed one is measured anew.

    Raises:
        CheckpointError: a folder lacks the weights or config.json.
    """
    return each_checkpoint(line, _hashes)


def _hashes(folder: Path) -> list[str | None]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing")
    # A foreign checkpoint has no contract.
    return [hash_file(folder / name) if (folder / name).is_file() else None for name in (CONFIG, WEIGHTS, CONTRACT)]
