"""OneSequence: what the decoding sessions of all built-in algorithms share, and how a token is drawn."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from firesteel.drafters.config import DraftConfig
from firesteel.errors import RecipeError, ResourceError

_FIRST_CAPACITY = 512  # positions to make room for at first; doubled as needed
_BACK = 64  # with a window, positions by which a session can be rewound


class OneSequence:
    """Length, limits and room of a session for one sequence, and the way from draft ids to target ids.

    `kept` names the tensors that hold something of every position, with their axis of positions. Behind `length` they hold what a draft
    or a rewind left there; whoever comes next overwrites it.

    Raises:
        RecipeError: tables or temperatures do not fit the drafter.
    """

    kept: ClassVar[dict[str, int]] = {}

    def __init__(
        self, config: DraftConfig, device: torch.device, draft_to_target: Tensor | None, max_length: int, temperatures: Sequence[float] | None
    ) -> None:
        check_tables(config, draft_to_target, temperatures)
        self.config, self.device, self.max_length, self.length = config, device, max_length, 0
        self.base = 0  # first position that is still kept
        self._window: int | None = None  # positions that a draft looks back at most; None: all
        self.draft_to_target = None if draft_to_target is None else draft_to_target.to(device)
        self._room = 0

    def fork(self) -> Self:
        """An empty session for another sequence; weights are shared."""
        other = copy.copy(self)
        other.length = other.base = other._room = 0
        for name, axis in self.kept.items():
            setattr(other, name, getattr(self, name).narrow(axis, 0, 0).clone())
        return other

    def rewind(self, length: int) -> None:
        """Forget all positions from `length` on.

        Raises:
            RecipeError: there are not so many; or what a draft there would look back to is no longer kept (short of 0, the beginning).
        """
        if not 0 <= length <= self.length:
            raise RecipeError(f"cannot rewind a session of {self.length} positions to {length}")
        if length == 0:
            self.base = 0
        elif self._window is not None and max(0, length - self._window + 1) < self.base:
            raise RecipeError(f"cannot rewind to {length}: a window of {self._window} is kept up to position {self.base} only", mend="rewind to 0")
        self.length = length

    def expand(self, probs: Tensor) -> Tensor:
        """`[n, V_d]` over the draft vocabulary -> `[n, V]` over the target's (the same tensor where they are one)."""
        return over_target(probs, self.draft_to_target, self.config.vocab_size)

    def begin_observing(self, count: int) -> tuple[int, int]:
        """First and end of the next `count` positions that have to be kept, for which, and a block behind them, there is room.

        With a window those that no draft will look at are left out, and earlier ones are dropped, so that the room does not grow with the text.

        Raises:
            ResourceError: more positions than `max_length`.
        """
        start, end = self.length, self.length + count
        if end > self.max_length:
            raise ResourceError(f"a drafting session for {self.max_length} positions was given {end}", mend="open the session with a higher max_length")
        if self._window is not None and end + self.config.block_size - self.base > max(_FIRST_CAPACITY, 2 * (self._window + _BACK) + self.config.block_size):
            self._drop(max(self.base, end - self._window - _BACK))
            start = max(start, self.base)
        self.reserve(end + self.config.block_size)
        return start, end

    def _drop(self, base: int) -> None:
        """Keep nothing before `base`."""
        left = max(0, self.length - base)
        for name, axis in self.kept.items():
            held: Tensor = getattr(self, name)
            held.narrow(axis, 0, left).copy_(held.narrow(axis, base - self.base, left).clone() if left else held.narrow(axis, 0, 0))
        self.base = base

    def begin_draft(self, count: int) -> None:
        """Make room for a block.

        Raises:
            RecipeError: `count` tokens cannot be drafted.
        """
        most = self.config.num_drafts
        if not 1 <= count <= most:
            raise RecipeError(f"cannot draft {count} tokens with a block of {self.config.block_size} slots", mend=f"draft 1 to {most}")
        self.reserve(self.length + self.config.block_size)

    def reserve(self, positions: int) -> None:
        """Make room for positions up to this one in all that is `kept`."""
        wanted, held = positions - self.base, max(0, self.length - self.base)
        if wanted <= self._room:
            return
        self._room = min(max(wanted, 2 * self._room, _FIRST_CAPACITY), self.max_length + self.config.block_size)
        for name, axis in self.kept.items():
            old: Tensor = getattr(self, name)
            new = old.new_empty(*old.shape[:axis], self._room, *old.shape[axis + 1 :])
            new.narrow(axis, 0, held).copy_(old.narrow(axis, 0, held))
            setattr(self, name, new)


def check_tables(config: DraftConfig, draft_to_target: Tensor | None, temperatures: Sequence[float] | None) -> None:
    """Refuse tables that do not fit the drafter.

    Raises:
        RecipeError: they do not.
    """
    if config.reduced_vocab and draft_to_target is None:
        raise RecipeError("a drafter with a reduced vocabulary needs draft_to_target", mend="pass the target id of each draft id (id + d2t[id])")
    if draft_to_target is not None and draft_to_target.shape != (config.draft_vocab_size,):
        raise RecipeError(f"draft_to_target has {list(draft_to_target.shape)} entries for a draft vocabulary of {config.draft_vocab_size}")
    if temperatures is not None and len(temperatures) != config.num_drafts:
        raise RecipeError(f"{len(temperatures)} confidence temperatures for {config.num_drafts} drafted positions", mend="calibrate this drafter again")


def over_target(probs: Tensor, draft_to_target: Tensor | None, vocab_size: int) -> Tensor:
    """`[n, V_d]` over the draft vocabulary -> `[n, V]` over the target's (the same tensor where they are one)."""
    if draft_to_target is None:
        return probs
    return probs.new_zeros(probs.shape[0], vocab_size).index_copy_(1, draft_to_target, probs)


def draw(probs: Tensor, generator: torch.Generator | None) -> int:
    """A draw from a distribution `[V]`, by an exponential race: argmax of p / E with E exponential; never what has probability zero."""
    race = torch.empty_like(probs).exponential_(generator=generator)
    return int((probs / race.clamp_(min=torch.finfo(probs.dtype).tiny)).argmax())
