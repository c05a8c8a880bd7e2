"""Warm start of training: the checkpoint that `drafter.init` names, in the speculators format."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from firesteel.artifact import hash_file
from firesteel.batches.vocab import DraftVocab
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.warm import init_from_checkpoint
from firesteel.errors import CheckpointError, RecipeError
from firesteel.package.export import WEIGHTS
from firesteel.package.load import LoadedDraft, describe, load
from firesteel.recipe import Drafter


def warm_source(settings: Drafter) -> LoadedDraft | None:
    """The checkpoint to begin with, or None.

    It may have been trained for another revision of the target: that is what fine-tuning is for, so only sizes must fit.

    Raises:
        RecipeError: `drafter.init` is neither a known word nor a folder.
        CheckpointError: the folder is no checkpoint that can be read, or it has tables of its own.
    """
    folder = _folder(settings)
    if folder is None:
        return None
    try:
        loaded = load(folder)
    except CheckpointError as e:
        raise _unread(settings, e) from None
    own = [
        name for name, table in (("an embedding", loaded.embed), ("an LM head", None if loaded.config.reduced_vocab else loaded.head_rows)) if table is not None
    ]
    if own:
        raise CheckpointError(
            f"drafter.init={settings.init}: it has {' and '.join(own)} of its own, but drafters are trained with the target's",
            mend="firesteel convert --target TARGET leaves out copies of the target's tables",
        )
    return loaded


def warm_described(settings: Drafter) -> DraftConfig | None:
    """What the checkpoint to begin with says of itself, or None; its weights are not read.

    Raises:
        RecipeError, CheckpointError: as `warm_source`, for the files that are read.
    """
    folder = _folder(settings)
    if folder is None:
        return None
    try:
        return describe(folder)[0]
    except CheckpointError as e:
        raise _unread(settings, e) from None


def warm_key(settings: Drafter) -> str:
    """What a training artifact depends on: the word, or the contents of the checkpoint wherever it lies.

    Raises:
        RecipeError, CheckpointError: as `warm_source`.
    """
    folder = _folder(settings)
    if folder is None:
        return settings.init
    if not (folder / WEIGHTS).is_file():
        warm_source(settings)  # says what is wrong with it
    return hash_file(folder / WEIGHTS)


def _unread(settings: Drafter, error: CheckpointError) -> CheckpointError:
    return CheckpointError(f"drafter.init={settings.init}: {error.message}", mend=f"of another layout? firesteel convert {settings.init} NEW_FOLDER")


def _folder(settings: Drafter) -> Path | None:
    """The folder that `drafter.init` names, or None for its words."""
    if settings.init in ("random", "target"):
        return None
    folder = Path(settings.init)
    if not folder.is_dir():
        raise RecipeError(f"drafter.init={settings.init} is no folder", mend="random, target, or the folder of a checkpoint")
    return folder


def begin(drafter: nn.Module, loaded: LoadedDraft, vocab: DraftVocab | None, head: Tensor) -> str:
    """Give a fresh drafter the checkpoint's weights and say what happened.

    Args:
        head: `[V, H]` the target's LM head, which the drafter is trained with.

    Raises:
        RecipeError: the weights do not fit.
    """
    ids = None if vocab is None else vocab.target_ids
    fresh = init_from_checkpoint(drafter, loaded.tensors, loaded.config, str(loaded.folder), source_ids=loaded.target_ids, target_ids=ids)
    said = f"{len(loaded.tensors)} tensors from {loaded.folder}" + (f"; fresh: {', '.join(fresh[:4])}{' ...' if len(fresh) > 4 else ''}" if fresh else "")
    if loaded.head_rows is not None and loaded.target_ids is not None:
        rows = head.detach().cpu()[loaded.target_ids].to(loaded.head_rows.dtype)
        if not torch.equal(rows, loaded.head_rows):
            said += "; its own LM head is not taken over: drafters are trained with the target's rows"
    return said
