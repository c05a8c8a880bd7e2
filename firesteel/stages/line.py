"""What all stages share: the recipe, the run's folder, the target (loaded once, when first needed) and the way to say things."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from firesteel.artifact import Artifact, ArtifactWriter, is_current, make_key, open_artifact
from firesteel.drafters.registry import get_spec
from firesteel.errors import RecipeError
from firesteel.hidden.weights import weights_digest
from firesteel.prompts.sources import Loaded, load_sources
from firesteel.recipe import Recipe
from firesteel.target.front import load_front
from firesteel.target.local import LocalTarget, load_target
from firesteel.target.native import read_native
from firesteel.target.session import TargetSession
from firesteel.target.spec import check_layer_ids, default_layer_ids
from firesteel.training.parallel import ALONE, World


class Bar(Protocol):
    """A progress bar."""

    def advance(self, amount: float = 1, note: str = "") -> None: ...

    def set(self, done: float, note: str = "") -> None: ...


class Screen(Protocol):
    """Where a stage speaks to its user."""

    def say(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def bar(self, label: str, total: float) -> AbstractContextManager[Bar]: ...


@dataclass
class Line:
    """A run: every stage gets this and nothing else."""

    recipe: Recipe
    screen: Screen
    world: World = ALONE
    timings: dict[str, float] = field(default_factory=dict)
    _session: TargetSession | None = None
    _sources: dict[Literal["train", "eval"], Loaded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module = self.recipe.drafter.module
        if module is not None:
            try:
                importlib.import_module(module)
            except ImportError as e:
                raise RecipeError(f"drafter.module={module} cannot be imported: {e}", mend="install it, or add its folder to PYTHONPATH") from e

    @property
    def folder(self) -> Path:
        return self.recipe.run_dir

    @cached_property
    def target(self) -> LocalTarget:
        started, settings = time.monotonic(), self.recipe.target
        # With servers for its layers its ends are enough, as long as nobody here decodes with it.
        front = load_front(settings, weights_digest) if settings.engine == "vllm" else None
        if front is None and settings.engine == "vllm":
            self.screen.warn(
                f"target {settings.model}: it has no safetensors, so its ends cannot be read alone; every process loads all its layers, "
                "with the time and memory that target.engine=local takes. Save it as safetensors to spare that"
            )
        target = front or load_target(settings, weights_digest)
        spec = get_spec(self.recipe.drafter.algorithm)
        spec.fits(self.recipe.drafter, target.text_config, lambda: read_native(settings, spec.stitch))
        loaded = "its ends loaded" if front is not None else "loaded"
        self.screen.say(
            f"target {target.spec.name}: {target.spec.architecture}, {target.spec.num_layers} layers, {loaded} in {time.monotonic() - started:.1f} s"
        )
        return target

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:
        return pick_layer_ids(self.recipe, self.target.spec.num_layers)

    def sources(self, split: Literal["train", "eval"]) -> Loaded:
        """The rows of prompts.sources of a split; they are read once, until `forget_sources`."""
        if split not in self._sources:
            self._sources[split] = load_sources(self.recipe.prompts, split)
        return self._sources[split]

    def forget_sources(self) -> None:
        """Give back their memory."""
        self._sources.clear()

    def decoding_session(self, layer_ids: tuple[int, ...], length: int) -> TargetSession:
        """A decoding session of the target; drafters with the same layers share it, so that its packed weights exist once."""
        if self._session is None or self._session.layer_ids != layer_ids or self._session.max_length < length:
            self._session = TargetSession(self.target.model, layer_ids, max_length=length)
        return self._session

    def input(self, name: str) -> Artifact:
        """An earlier stage's artifact, verified."""
        return open_artifact(self.folder / name, name)

    def stage(
        self,
        name: str,
        settings: dict[str, Any],
        inputs: dict[str, str],
        work: Callable[[ArtifactWriter], dict[str, Any]],
        *,
        drop: tuple[str, ...] = (),
        loose: tuple[str, ...] = (),
    ) -> Artifact:
        """Make artifact `name`, or skip it if it is there with the same settings and inputs.

        In a world of several processes all of them work on it in one folder, which the first one makes and commits.

        Args:
            settings: the part of the recipe that the artifact depends on.
            inputs: content hashes of what it is made from.
            work: fills the working folder and returns what the manifest should say.
            drop: names in the folder that were only needed to resume.
            loose: files in it that may change later without its content changing.
        """
        path = self.folder / name
        first = self.world.first
        if self.world.tell(first and is_current(path, name, make_key(name, settings, inputs))):
            self.screen.say(f"{name}: up to date")
            return open_artifact(path, name)
        if first:
            writer = ArtifactWriter(path, name, settings, inputs)
        self.world.wait()
        if not first:
            writer = ArtifactWriter(path, name, settings, inputs, shared=True)
        if writer.resumed:
            self.screen.say(f"{name}: resuming")
        started = time.monotonic()
        about = work(writer)
        if first:
            artifact = writer.commit(about, drop=drop, loose=loose)
        self.world.wait()
        if not first:
            artifact = open_artifact(path, name, verify=False)
        self.timings[name] = time.monotonic() - started
        self.screen.say(f"{name}: done in {self.timings[name]:.1f} s")
        return artifact


def pick_layer_ids(recipe: Recipe, num_layers: int) -> tuple[int, ...]:
    """The layers that a recipe captures of a target of `num_layers`.

    Raises:
        RecipeError: the target does not have one of them, or they lack one that the drafter reads.
    """
    wanted, captures = recipe.target.layer_ids, get_spec(recipe.drafter.algorithm).captures
    needed = () if captures is None else captures(num_layers)
    ids = (tuple(needed) or default_layer_ids(num_layers)) if isinstance(wanted, str) else tuple(wanted)
    check_layer_ids(ids, num_layers)
    lacking = [i for i in needed if i not in ids]
    if lacking:
        raise RecipeError(
            f"target.layer_ids={list(ids)} lacks {lacking[0]}, which drafter.algorithm={recipe.drafter.algorithm} reads",
            mend=f"leave out target.layer_ids, or add {lacking[0]}",
        )
    return ids
