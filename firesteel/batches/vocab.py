"""A reduced draft vocabulary: the tokens that the target uses most, and the tables between the two numberings.

`d2t[i]` is an offset: draft id i is target id `i + d2t[i]`. `t2d` marks the target ids that have a draft id. Both
tables travel in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, DataError, RecipeError


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """Which target tokens a drafter can propose.

    Attributes:
        target_ids: `[V_draft]` int64, the target id of each draft id; ascending if built here (a foreign table may have any order).
        vocab_size: size of the target's vocabulary.
    """

    target_ids: Tensor
    vocab_size: int

    def __len__(self) -> int:
        return self.target_ids.shape[0]

    @cached_property
    def d2t(self) -> Tensor:
        """`[V_draft]` int64 offsets: target id - draft id."""
        return self.target_ids - torch.arange(len(self))

    @cached_property
    def t2d(self) -> Tensor:
        """`[V]` bool: does the target id have a draft id?"""
        return self._draft_ids >= 0

    @cached_property
    def _draft_ids(self) -> Tensor:
        """`[V]` int64: draft id of each target id, -1 where none."""
        table = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        table[self.target_ids] = torch.arange(len(self))
        return table

    def to_draft(self, ids: Tensor) -> Tensor:
        """Target ids of any shape -> draft ids, -1 for tokens that the drafter cannot propose."""
        return self._draft_ids[ids]

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens (`[V]`) that have a draft id; 1 if nothing was counted."""
        total = int(counts.sum())
        return int(counts[self.target_ids].sum()) / total if total else 1.0


def count_supervised(documents: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """How often each token is supervised: `(token_ids [T], loss_mask [T])` of every document -> `[V]` int64.

    Raises:
        DataError: a token id is outside the vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for number, (token_ids, loss_mask) in enumerate(documents):
        found = token_ids[loss_mask]
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
            raise DataError(
                f"document {number} has token ids from {int(found.min())} to {int(found.max())}, the target's vocabulary ends at {vocab_size - 1}",
                mend="the documents were made with another tokenizer: run the stages from `prompts` again",
            )
        counts += torch.bincount(found, minlength=vocab_size)
    return counts


def build_vocab(counts: Tensor, size: int, always: Sequence[int]) -> DraftVocab:
    """The `size` most frequent tokens (ties: the lower id), with those of `always` (end of text, end of turn) in any case.

    Args:
        counts: `[V]` int64, how often each target token is supervised.

    Raises:
        RecipeError: `size` does not lie between the number of `always` tokens and V, or one of them is not in the vocabulary.
    """
    vocab_size = counts.shape[0]
    outside = [i for i in always if not 0 <= i < vocab_size]
    if outside:
        raise RecipeError(f"end token {outside[0]} is outside the target's vocabulary of {vocab_size}", mend="check the tokenizer beside target.model")
    if not max(1, len(set(always))) <= size <= vocab_size:
        raise RecipeError(
            f"drafter.draft_vocab_size={size} must lie between {max(1, len(set(always)))} (the end tokens) and {vocab_size} (the target's vocabulary)",
            mend=f"drafter.draft_vocab_size={vocab_size} is the whole vocabulary",
        )
    rank = counts.clone()
    rank[list(always)] = torch.iinfo(torch.int64).max
    chosen = rank.argsort(descending=True, stable=True)[:size]
    return DraftVocab(chosen.sort().values, vocab_size)


def vocab_from_tables(d2t: Tensor, t2d: Tensor) -> DraftVocab:
    """The vocabulary that a checkpoint's tables describe: `d2t [V_draft]` integer offsets, `t2d [V]` bool (or 0/1).

    Raises:
        CheckpointError: the tables have the wrong type, or contradict themselves or each other.
    """
    if d2t.ndim != 1 or t2d.ndim != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool or t2d.is_floating_point():
        raise CheckpointError(f"d2t is {d2t.dtype} {list(d2t.shape)} and t2d is {t2d.dtype} {list(t2d.shape)}, not a row of offsets and a row of booleans")
    if t2d.dtype != torch.bool and not bool(((t2d == 0) | (t2d == 1)).all()):
        raise CheckpointError("t2d holds values other than 0 and 1: it marks target tokens, it does not number them")
    marked, vocab_size = t2d.cpu().bool(), t2d.shape[0]
    target_ids = d2t.cpu().long() + torch.arange(d2t.shape[0])
    if target_ids.numel() == 0 or int(target_ids.min()) < 0 or int(target_ids.max()) >= vocab_size:
        raise CheckpointError(f"d2t leads outside the target's vocabulary of {vocab_size}", mend="d2t holds offsets: target id = draft id + d2t[draft id]")
    if target_ids.unique().numel() != target_ids.numel():
        raise CheckpointError("d2t leads from several draft ids to the same target id", mend="d2t holds offsets: target id = draft id + d2t[draft id]")
    named = torch.zeros_like(marked)
    named[target_ids] = True
    if not torch.equal(named, marked):
        first = int((named != marked).nonzero()[0])
        raise CheckpointError(
            f"d2t names {int(named.sum())} target tokens, t2d marks {int(marked.sum())}; the first they disagree about is {first}",
            mend="the two tables come from different drafters, or d2t holds target ids in place of offsets",
        )
    return DraftVocab(target_ids, vocab_size)
