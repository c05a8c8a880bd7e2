"""`evaluate.extra`: further prompts to report. Their files are looked at before anything is spent, and read again when they are measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firesteel import recipe as recipes
from firesteel.artifact import hash_file
from firesteel.errors import DataError
from firesteel.prompts.sources import Loaded, load_file


def read_extra(extra: recipes.ExtraSet) -> Loaded:
    """The prompts of a set.

    Raises:
        DataError: the file is missing, cannot be read or has no usable row; names the set.
    """
    try:
        return load_file(Path(extra.path).expanduser(), limit=extra.limit, domain=None)
    except (DataError, OSError) as e:
        raise _unusable(extra, e) from None


def hash_extra(sets: Sequence[recipes.ExtraSet]) -> list[str]:
    """Contents of the files, so that a changed one is measured anew.

    Raises:
        DataError: one is missing or cannot be read.
    """
    found = []
    for extra in sets:
        try:
            found.append(hash_file(Path(extra.path).expanduser()))
        except OSError as e:
            raise _unusable(extra, e) from None
    return found


def _unusable(extra: recipes.ExtraSet, why: DataError | OSError) -> DataError:
    said = why.message if isinstance(why, DataError) else f"{extra.path} cannot be read: {why.strerror}"
    return DataError(f"evaluate.extra: {extra.name}: {said}", mend="give a file of prompts as its path (relative to where the command runs), or leave it out")
