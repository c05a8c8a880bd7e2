"""Resumable states of a training run, and the best weights so far.

A state is a folder `state/STEP` of torch.distributed.checkpoint files, in which every rank writes its part, and `facts.json`. It is made as
`STEP.tmp` and renamed when all of it is on disk, and only then is the one before deleted: whatever happens in between, one whole state is
there. The state of the best validation is kept beside the newest, to go back to. Shards are put together anew at loading, so a state may be
resumed by another number of processes, spread in another way.

Saving goes on beside training. A thread copies parameters and optimizer state while the next step's gradients are computed, which leaves them
alone; only the optimizer waits until the copy is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from firesteel.artifact import disk_error, write_atomic
from firesteel.errors import ArtifactError
from firesteel.training.optimizer import Optimizers
from firesteel.training.parallel import World
from firesteel.training.replica import whole_state

STATE, BEST = "state", "best.safetensors"
_FACTS, _UNFINISHED = "facts.json", ".tmp"
PATIENCE = 600.0  # seconds that a run which ends in trouble waits for its last state: another rank, without which it never gets whole, may be gone

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")  # one process is what we mean


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
        spiked: steps skipped for a loss far above the usual.
        returns: times that training went back to its last good state.
        rate: what learning rates are multiplied by since then.
        losses, troubles: of the last steps, the losses of those taken and the numbers of those skipped (`training.guards`).
        easier: by how much the first draft was right more often in training than in validation within the first pass (`training.watch`).
    """

    step: int = 0
    batch: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    since_best: int = 0
    skipped: int = 0
    last_validation: int = -1
    spiked: int = 0
    returns: int = 0
    rate: float = 1.0
    losses: list[float] = field(default_factory=list)
    troubles: list[int] = field(default_factory=list)
    easier: float | None = None


class Saver:
    """Saves and loads the states of one run. Every rank has one, and calls its methods alike.

    Args:
        folder: the run's; all ranks see the same.
        settings: what the run's results depend on.

    Attributes:
        held: seconds that saving has kept training waiting.
        saves: states begun.
        size: bytes of a state, all ranks' parts together, about: parameters and two momenta.
        at: the step of the last state that is whole on disk (rank 0), -1 without one.
        whole: parameters, optimizer and progress are of one step. What is saved otherwise would be a mixture.
    """

    def __init__(self, folder: Path, drafter: nn.Module, optimizers: Optimizers, world: World, settings: dict[str, Any]) -> None:
        self.folder, self.drafter, self.optimizers, self.world, self.settings = folder / STATE, drafter, optimizers, world, settings
        self.held, self.saves, self.at, self.whole = 0.0, 0, -1, True
        self.size = 3 * sum(p.numel() * p.element_size() for p in drafter.parameters())
        # The thread's messages must not mix with training's.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._error: BaseException | None = None
        self._name = ""  # of the last state, done or under way

    @property
    def busy(self) -> bool:
        """Whether this rank is still saving."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, progress: Progress, *, good: bool = False) -> None:
        """Save how things stand now, beside what comes next; before the optimizer's next step `let_copy` must be called.

        Args:
            good: it is a state to go back to, and stays until there is another such.
        """
        started = time.monotonic()
        self.finish()
        tensors = _tensors(self.drafter, self.optimizers)
        random = torch.get_rng_state()
        facts = {"progress": asdict(progress), "settings": self.settings, "processes": self.world.size, "good": good}
        name = f"{progress.step:09d}"
        self._name = f"{self._name}+" if self._name.startswith(name) else name  # a second one of a step must not be in the way of the first
        self.saves += 1
        self._copied.clear()
        self._thread = threading.Thread(target=self._save, args=(self.folder / self._name, tensors, random, facts), name="saver", daemon=True)
        self._thread.start()
        self.held += time.monotonic() - started

    def let_copy(self) -> None:
        """Wait until a state under way no longer needs the parameters as they are."""
        if self._thread is not None:
            started = time.monotonic()
            self._copied.wait()
            self.held += time.monotonic() - started

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around what turns one step into the next. Where that is broken off, things are not `whole` again."""
        self.whole = False
        yield
        self.whole = True

    def finish(self, patience: float | None = None) -> None:
        """Wait until a state under way is whole on disk, or has failed; `patience` seconds at most, if given."""
        if self._thread is not None:
            self._thread.join(patience)
            self._thread = None

    def error(self) -> str | None:
        """Why the last state could not be saved, told once; the one before it is still there."""
        found, self._error = self._error, None
        if found is None:
            return None
        causes = [e for e, _ in getattr(found, "failures", {}).values()] or [found]
        full = next((e for e in causes if isinstance(e, OSError)), None)
        return f"no checkpoint of this state: {disk_error(full, self.folder).message if full else causes[0]}; the last one is kept"

    def load(self) -> Progress:
        """Fill drafter and optimizers from the newest state, if there is one.

        Raises:
            ArtifactError: the state was made under other settings, or is damaged.
        """
        path = self.world.tell(self._newest() if self.world.first else None)
        if path is None:
            return Progress()
        try:
            facts = json.loads((path / _FACTS).read_text())
            self._check(path, facts["settings"])
            self._fill(path)
            self._name = path.name
            progress = Progress(**facts["progress"])
            self.at = progress.step
            return progress
        except ArtifactError:
            raise
        except (Exception, dcp.api.CheckpointException) as e:  # what is damaged can raise anything
            raise ArtifactError(f"the training state {path} is corrupt: {e}", mend=f"delete {path} to train from the start") from None

    def go_back(self) -> int | None:
        """Fill drafter and optimizers from the newest good state, which is a collective; its step, or None where there is none.

        Raises:
            ArtifactError: the state is damaged.
        """
        self.finish()
        path = self.world.tell(self._good() if self.world.first else None)
        if path is None:
            return None
        try:
            with self.changing():
                self._fill(path)
            return int(json.loads((path / _FACTS).read_text())["progress"]["step"])
        except (Exception, dcp.api.CheckpointException) as e:
            raise ArtifactError(f"the training state {path} is corrupt: {e}", mend=f"delete {path}; the same command goes on from another") from None

    def _good(self) -> Path | None:
        good = [p for p in self._whole() if json.loads((p / _FACTS).read_text()).get("good")]
        return good[-1] if good else None

    def _fill(self, path: Path) -> None:
        reader = dcp.FileSystemReader(path)
        names: dict[Tensor, str] = {p: name for name, p in self.drafter.named_parameters()}
        stored = {n: m for n, m in reader.read_metadata().state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        optimizer = self.optimizers.room(names, {n: (m.size, m.properties.dtype) for n, m in stored.items()})
        random = torch.get_rng_state()
        wanted = {f"drafter/{name}": t.detach() for name, t in self.drafter.state_dict().items()} | optimizer
        mine = f"random/{self.world.rank}"
        if mine in stored:  # a rank that was not there then goes on with its own
            wanted[mine] = random
        dcp.load(wanted, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        torch.set_rng_state(random)

    def _check(self, path: Path, theirs: dict[str, Any]) -> None:
        ours, theirs = _flat(json.loads(json.dumps(self.settings, default=str))), _flat(theirs)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise ArtifactError(
                    f"the training state {path} is of another recipe: {name} is {theirs.get(name)} there and {ours.get(name)} here",
                    mend=f"set {name} back, or delete {path} to train from the start",
                )

    def _newest(self) -> Path | None:
        """The newest whole state; what was never finished is swept away."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.suffix == _UNFINISHED:
                shutil.rmtree(path, ignore_errors=True)
        whole = self._whole()
        return whole[-1] if whole else None

    def _whole(self) -> list[Path]:
        """The whole states, oldest first."""
        found = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        return [p for p in found if p.suffix != _UNFINISHED and (p / _FACTS).is_file()]

    def _save(self, path: Path, tensors: dict[str, Tensor], random: Tensor, facts: dict[str, Any]) -> None:
        temporary = path.with_suffix(_UNFINISHED)
        try:
            try:
                copies = {name: _copy(t) for name, t in tensors.items()} | {f"random/{self.world.rank}": random}
            finally:
                self._copied.set()
            writer = dcp.FileSystemWriter(temporary)
            dcp.save(copies, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            if self.world.first:
                write_atomic(temporary / _FACTS, json.dumps(facts, default=str))
                self._commit(temporary, path)
                self.at = facts["progress"]["step"]
        except BaseException as e:  # CheckpointException is no Exception
            self._error = e
            if self.world.first:
                shutil.rmtree(temporary, ignore_errors=True)

    def _commit(self, temporary: Path, path: Path) -> None:
        """Give a whole state its name, and delete those before it but the newest good one."""
        temporary.rename(path)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)  # the rename is on disk before its predecessor goes
        finally:
            os.close(handle)
        good = self._good()
        for other in self.folder.iterdir():
            if other.name < path.name and other != good:  # another rank may have begun with the next
                shutil.rmtree(other, ignore_errors=True)


def _tensors(drafter: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {p: name for name, p in drafter.named_parameters()}
    return {f"drafter/{name}": t.detach() for name, t in drafter.state_dict().items()} | optimizers.tensors(names)


def _copy(tensor: Tensor) -> Tensor:
    """A copy in CPU memory; of a shard, the shard's."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local().to("cpu", copy=True)
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return tensor.detach().to("cpu", copy=True)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def save_best(folder: Path, module: nn.Module, world: World) -> None:
    """The weights with the best validation so far, whole, from rank 0; with shards a collective."""
    tensors = whole_state(module)
    if world.first:
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
