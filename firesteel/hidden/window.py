"""What a feed holds: the samples of the next batches in the order of the plan, bounded in tokens. Bookkeeping only: no threads, no clock.

A token is held from the moment its sample is asked for until the batch that uses it is taken. Below the low watermark the
window asks for more, in order, until the next sample would exceed the high one; so the bound holds whatever arrives when.
Samples that may be used again stay behind as spares, within a bound of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from firesteel.errors import RecipeError
from firesteel.recipe import Feed

S = TypeVar("S")
Plan = Callable[[int], list[int]]  # batch number -> its documents, by number


def watermarks(settings: Feed, step_tokens: int) -> tuple[int, int]:
    """(low, high) in tokens, checked against the tokens of one optimiser step over all trainers.

    Raises:
        RecipeError: low is below a step, so that training would wait for samples that nobody fetches; high is below low; or
            samples are to be used again and none may be kept.
    """
    low = 2 * step_tokens if settings.low_tokens is None else settings.low_tokens
    high = 2 * low if settings.high_tokens is None else settings.high_tokens
    if low < step_tokens:
        raise RecipeError(
            f"hidden.feed.low_tokens={low} is below the {step_tokens} tokens of one optimiser step: training would wait for ever",
            mend=f"set hidden.feed.low_tokens to {step_tokens} or more, or make train.batch_tokens or train.accumulate smaller",
        )
    if high < low:
        raise RecipeError(f"hidden.feed.high_tokens={high} is below hidden.feed.low_tokens={low}", mend=f"set hidden.feed.high_tokens to {low} or more")
    if (settings.uses > 1) != (settings.keep_tokens > 0):
        raise RecipeError(
            f"hidden.feed.uses={settings.uses} and hidden.feed.keep_tokens={settings.keep_tokens} contradict each other",
            mend="set uses above 1 and keep_tokens to what may be kept for it, or leave both out",
        )
    return low, high


@dataclass(eq=False)
class Slot(Generic[S]):
    """A place of a batch: the document that belongs there, its sample once it has come, and how often that was used before."""

    batch: int
    document: int
    sample: S | None = None
    used: int = 0


class Window(Generic[S]):
    """The slots of the next batches.

    Args:
        lengths: tokens of each document.
        low, high: watermarks in tokens, see `watermarks`.
        uses: batches that a sample may be used in.
        keep: tokens of used samples that are kept for that.
        stop: the batch number that is not wanted any more; None: no end.
    """

    def __init__(self, lengths: Sequence[int], plan: Plan, *, low: int, high: int, uses: int = 1, keep: int = 0, stop: int | None = None) -> None:
        self.lengths, self.plan, self.low, self.high, self.stop = lengths, plan, low, high, stop
        self.uses, self.keep = uses, keep
        self.held = self.peak = 0
        self._spares: dict[int, tuple[S, int]] = {}
        self._spare_tokens = 0
        self._batches: dict[int, list[Slot[S]]] = {}
        self.seek(0)

    def seek(self, number: int) -> list[Slot[S]]:
        """Make batch `number` the next one; returns the slots that are given up. Spares stay."""
        dropped = [slot for batch in self._batches.values() for slot in batch]
        self.next = self._planning = number
        self._planned: list[int] | None = None
        self._batches = {}
        self.held, self._filling = 0, True
        return dropped

    def wanted(self) -> list[Slot[S]]:
        """The slots to fill now, in order; those that a spare fills already hold it."""
        if self.held <= self.low:
            self._filling = True
        found: list[Slot[S]] = []
        while self._filling and (self.stop is None or self._planning < self.stop):
            if self._planned is None:
                self._planned = self.plan(self._planning)
            slots = self._batches.setdefault(self._planning, [])
            if len(slots) == len(self._planned):
                self._planning, self._planned = self._planning + 1, None
                continue
            document = self._planned[len(slots)]
            length = self.lengths[document]
            if self.held + length > self.high:
                self._filling = False
                break
            slot: Slot[S] = Slot(self._planning, document)
            if document in self._spares:
                slot.sample, slot.used = self._spares.pop(document)
                self._spare_tokens -= length
            self.held += length
            slots.append(slot)
            found.append(slot)
        self.peak = max(self.peak, self.held + self._spare_tokens)
        return found

    def ready(self, number: int) -> bool:
        """Whether every sample of the next batch is here."""
        assert number == self.next, "batches are taken in order"
        slots = self._batches.get(number, [])
        whole = self._planning > number or (self._planned is not None and len(slots) == len(self._planned))
        return whole and all(slot.sample is not None for slot in slots)

    def consume(self, number: int) -> list[S]:
        """Take the samples of the next batch, in order; they are deleted here, but for those that may be used again."""
        assert self.ready(number)
        samples: list[S] = []
        for slot in self._batches.pop(number):
            assert slot.sample is not None, "the batch is ready"
            samples.append(slot.sample)
            length, used = self.lengths[slot.document], slot.used + 1
            self.held -= length
            if used < self.uses and slot.document not in self._spares and self._spare_tokens + length <= self.keep:
                self._spares[slot.document] = slot.sample, used
                self._spare_tokens += length
        self.next = number + 1
        self.peak = max(self.peak, self.held + self._spare_tokens)
        return samples
