"""What a run will take, before anything is spent: tokens and bytes of hidden states, and whether there is room for them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from firesteel.errors import ResourceError, TemplateError
from firesteel.hidden.stores import predict_bytes
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.sources import Loaded, load_sources
from firesteel.prompts.template import prompt_tokens
from firesteel.stages.line import Line

_SAMPLE = 64  # prompts whose length is taken for that of all
_UNKNOWN = 64.0  # tokens of a prompt where there is none to look at
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
    """

    train: Loaded
    held_out: Loaded
    synthetic: int
    turns: int
    answers: int
    documents: int
    tokens: int
    nbytes: int


def forecast(line: Line) -> Forecast:
    """Read the prompts and reckon.

    Raises:
        DataError: prompts cannot be read.
    """
    recipe, spec = line.recipe, line.target.spec
    train, held_out = (load_sources(recipe.prompts, split) for split in ("train", "eval"))
    synthetic = sum(s.synthesize or 0 for s in recipe.prompts.sources)
    length = _length(line, (train.prompts or held_out.prompts)[:_SAMPLE])
    new, longest, samples = recipe.responses.max_new_tokens, recipe.hidden.max_length, recipe.responses.samples
    slots = [len(p.slots) for p in train.prompts for _ in range(samples)] + [1] * synthetic
    answers = sum(slots) * new
    tokens = int(sum(min(length + n * new, longest) for n in slots))
    size = predict_bytes(tokens, min(answers, tokens), len(line.layer_ids), spec.hidden_size, recipe.hidden.codec, max(1, len(slots)))
    return Forecast(train, held_out, synthetic, sum(slots), answers, len(slots), tokens, size)


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


def check_room(line: Line, nbytes: int, *, atmost: bool = False) -> None:
    """Refuse to begin where `hidden.store=disk` and the disk cannot take so many bytes of hidden states.

    Args:
        atmost: the bytes are an upper bound.

    Raises:
        ResourceError: both figures and the place.
    """
    free, where = free_disk(line.folder)
    if line.recipe.hidden.store == "disk" and nbytes > _USABLE * free:
        raise ResourceError(
            f"hidden states {'may' if atmost else 'would'} take {_size(nbytes)}, {_size(free)} are free at {where}",
            mend="set runs_dir=ANOTHER_DISK, hidden.codec=fp8, hidden.store=stream, fewer prompts or a lower responses.max_new_tokens",
        )


def check_room_ahead(line: Line, ahead: Forecast | None = None) -> None:
    """The same before a whole run, whose answers may take hours; where answers are there already, extraction knows the size itself.

    Raises:
        ResourceError: the hidden states may not fit.
    """
    begun = ("responses", "hidden", "hidden.partial")
    if line.recipe.hidden.store == "disk" and not any((line.folder / name).exists() for name in begun):
        check_room(line, (ahead or forecast(line)).nbytes, atmost=True)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
