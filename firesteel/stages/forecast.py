"""What a run will take, before anything is spent: tokens and bytes of hidden states, and whether there is room for them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from firesteel.errors import ResourceError, TemplateError
from firesteel.hidden.stores import predict_bytes
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.sources import Loaded
from firesteel.prompts.template import prompt_tokens
from firesteel.stages.line import Line

_SAMPLE = 64  # prompts whose length is taken for that of all
_UNKNOWN = 64.0  # tokens of a prompt where there is none to look at
_MEND = "set runs_dir=ANOTHER_DISK, hidden.codec=fp8, hidden.store=stream, fewer prompts or a lower responses.max_new_tokens"
_USABLE = 0.9  # of the free disk: checkpoints and the package need some of it, too


@dataclass(frozen=True)
class Forecast:
    """Upper bounds: every answer as long as it may be.

    Attributes:
        train, held_out: the rows of prompts.sources, before the target's template, length and duplicates are looked at.
        synthetic: prompts to synthesise.
        turns: answers of training and validation prompts.
        answers: tokens of these.
        documents: hidden states are captured of so many.
        tokens: of the documents.
        nbytes: of their hidden states.
        least: of the hidden states of the prompts alone.
    """

    train: Loaded
    held_out: Loaded
    synthetic: int
    turns: int
    answers: int
    documents: int
    tokens: int
    nbytes: int
    least: int


def forecast(line: Line) -> Forecast:
    """Read the prompts and reckon.

    Raises:
        DataError: prompts cannot be read.
    """
    recipe, spec = line.recipe, line.target.spec
    train, held_out = (line.sources(split) for split in ("train", "eval"))
    synthetic = sum(s.synthesize or 0 for s in recipe.prompts.sources)
    length = _length(line, (train.prompts or held_out.prompts)[:_SAMPLE])
    new, longest, samples = recipe.responses.max_new_tokens, recipe.hidden.max_length, recipe.responses.samples
    slots = [len(p.slots) for p in train.prompts for _ in range(samples)] + [1] * synthetic
    answers = sum(slots) * new
    tokens = int(sum(min(length + n * new, longest) for n in slots))
    most, least = (
        predict_bytes(among, supervised, len(line.layer_ids), spec.hidden_size, recipe.hidden.codec, len(slots))
        for among, supervised in ((tokens, min(answers, tokens)), (int(min(length, longest)) * len(slots), 0))
    )
    return Forecast(train, held_out, synthetic, sum(slots), answers, len(slots), tokens, most, least)


def _length(line: Line, prompts: list[Prompt]) -> float:
    """Mean tokens of those prompts that a run would take."""
    lengths = []
    for prompt in prompts:
        try:
            lengths.append(prompt_tokens(line.target.tokenizer, prompt))
        except TemplateError:  # a row that the stage `prompts` drops and counts
            continue
    fitting = [n for n in lengths if n <= line.recipe.prompts.max_tokens]
    return sum(fitting) / len(fitting) if fitting else _UNKNOWN


def free_disk(folder: Path) -> tuple[int, Path]:
    """Bytes free where a folder is or will be, and the part of its path that is already there."""
    where = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    return shutil.disk_usage(where).free, where


def check_room(line: Line, nbytes: int, *, sure: bool = True) -> None:
    """Refuse to begin where `hidden.store=disk` and the disk cannot take so many bytes of hidden states.

    Args:
        sure: not an upper bound.

    Raises:
        ResourceError: both figures and the place.
    """
    free, where = free_disk(line.folder)
    if line.recipe.hidden.store == "disk" and nbytes > _USABLE * free:
        raise ResourceError(f"hidden states {'would' if sure else 'may'} take {_size(nbytes)}, {_size(free)} are free at {where}", mend=_MEND)


def check_most(line: Line, ahead: Forecast) -> None:
    """Refuse where the states of the longest answers would not fit; not once there are answers, when extraction knows the size itself.

    Raises:
        ResourceError: both figures and the place.
    """
    if not _answered(line):
        check_room(line, ahead.nbytes, sure=False)


def check_room_ahead(line: Line) -> None:
    """The same for a run that is about to begin: it refuses where the prompts alone do not fit. Of the longest answers it warns: its own may be shorter.

    Raises:
        ResourceError: both figures and the place.
    """
    if line.recipe.hidden.store != "disk" or _answered(line):
        return
    ahead = forecast(line)
    check_room(line, ahead.least)
    try:
        check_most(line, ahead)
    except ResourceError as e:
        line.screen.warn(f"{e.message}, if every answer is as long as responses.max_new_tokens allows; extraction refuses what does not fit")


def _answered(line: Line) -> bool:
    return any((line.folder / name).exists() for name in ("responses", "hidden", "hidden.partial"))


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
