"""The registry of draft algorithms: what each is called, how it differs, how it is built and run."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.session import BlockSession
from firesteel.errors import RecipeError


@dataclass(frozen=True)
class DraftSpec:
    """One algorithm.

    Attributes:
        name: as in `drafter.algorithm`.
        sample_from_anchor: what an empty `drafter.sample_from_anchor` means.
        heads: whether it has Markov and confidence heads at all.
        build: makes the trainable module, which has `training_rows`.
        session: makes the decoding session; called as `BlockSession` is.
    """

    name: str
    sample_from_anchor: bool
    heads: bool
    build: Callable[[DraftConfig], nn.Module]
    session: Callable[..., BlockSession]


_specs: dict[str, DraftSpec] = {}


def register(spec: DraftSpec) -> None:
    """Add an algorithm, or replace the one of its name."""
    _specs[spec.name] = spec


def names() -> list[str]:
    """Registered algorithms, sorted."""
    return sorted(_specs)


def get_spec(name: str) -> DraftSpec:
    """The algorithm of this name.

    Raises:
        RecipeError: there is none; names the nearest.
    """
    if name not in _specs:
        near = difflib.get_close_matches(name, _specs, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names())}"
        raise RecipeError(f"drafter.algorithm={name} is not known", mend=hint)
    return _specs[name]


register(DraftSpec("dspark", sample_from_anchor=True, heads=True, build=BlockDrafter, session=BlockSession))
register(DraftSpec("dflash", sample_from_anchor=False, heads=False, build=BlockDrafter, session=BlockSession))
