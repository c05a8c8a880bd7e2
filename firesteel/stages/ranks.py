"""A verb as one of several processes, which torchrun starts: which verbs work so, and how they join."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from firesteel.errors import RecipeError
from firesteel.recipe import Recipe
from firesteel.stages.line import Bar
from firesteel.training.parallel import ALONE, World, close_world, launched_size, open_world

TOGETHER = ("train", "calibrate", "evaluate")


@contextmanager
def joined(verb: str, recipe: Recipe) -> Iterator[World]:
    """The world that this process belongs to while the verb runs.

    Raises:
        RecipeError: the verb is one process's work, or `train.context_ranks` does not divide the number of processes.
    """
    size = launched_size()
    if size > 1 and verb not in TOGETHER:
        raise RecipeError(
            f"`firesteel {verb}` is the work of one process, and this is one of {size} (WORLD_SIZE={size})",
            mend=f"run it without torchrun; with it: {', '.join(TOGETHER)}. `firesteel run RECIPE`, without, finds what they did",
        )
    if verb not in TOGETHER:
        yield ALONE
        return
    yield open_world(recipe.train.context_ranks if verb == "train" else 1)  # only training shares batches
    close_world()  # not after an error: whoever leaves in order would first wait for the others


class SilentScreen:
    """What all processes but the first speak to."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Bar]:
        yield _NoBar()


class _NoBar:
    def advance(self, amount: float = 1, note: str = "") -> None:
        pass

    def set(self, done: float, note: str = "") -> None:
        pass
