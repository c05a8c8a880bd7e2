"""Verb `convert`: a checkpoint from one layout into another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firesteel.package.convert.convert import TargetTables, read, write
from firesteel.package.convert.fields import read_overrides
from firesteel.stages.line import Line, Screen


def convert_once(line: Line | None, screen: Screen, source: Path, out: Path, to: str, overrides: Sequence[str]) -> None:
    """Read SOURCE in whatever layout it declares and write it to OUT.

    Args:
        line: gives the target, or None where it is not named; with it the drafter is checked, and the contract is written.

    Raises:
        CheckpointError: the source does not say what it must, contradicts itself or the target, or has no place in the new layout.
        RecipeError: an override that is not known.
    """
    given = read_overrides(overrides)
    target = None if line is None else TargetTables(line.target.spec, line.target.head.embed, line.target.head.weight, lambda: line.target.norm_weight)
    found = read(source, given, target)
    c = found.config
    screen.say(
        f"{source}: {c.algorithm} in the {found.layout} layout, {c.num_layers} layers, captured states {list(c.layer_ids)}, "
        f"{c.num_drafts} drafts a round, {'from' if c.sample_from_anchor else 'after'} the anchor"
    )
    for note in (*found.notes, *write(found, out, to, target)):
        screen.say(f"note: {note}")
    screen.say(f"{out}: written as {to}")
