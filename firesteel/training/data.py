"""Where training batches come from: stored samples, or samples that arrive, in an order that only the seed decides."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from firesteel.batches.anchors import eligible_anchors, sample_anchors, seeded
from firesteel.batches.batch import Batch
from firesteel.batches.packing import BlockLayout, eval_batches, pack, plan_epoch
from firesteel.hidden.feed import SampleFeed
from firesteel.hidden.sample import HiddenSample
from firesteel.hidden.stores import HiddenStore

_ORDER, _ANCHORS = 0, 1  # what a random stream is for


class BatchSource:
    """Batch number b of a run, for any b: the seed and b fix its documents and anchors, so resuming needs no random state.

    Args:
        store: has the samples of `keys`; or a feed, whose documents are `keys` in this order.
        lengths: tokens of each document in `keys`.
        batch_tokens: tokens of a batch at most.
        anchors: blocks of a batch at most.

    Attributes:
        stop: the batch number that will not be wanted any more, for a feed; None: no end. To be set before the first `take`.
    """

    def __init__(
        self, store: HiddenStore | SampleFeed, keys: Sequence[str], lengths: Sequence[int], layout: BlockLayout, *, batch_tokens: int, anchors: int, seed: int
    ) -> None:
        self.store, self.keys, self.lengths, self.layout, self.seed = store, list(keys), list(lengths), layout, seed
        self.batch_tokens, self.anchors = batch_tokens, anchors
        self.waited = 0.0
        self.stop: int | None = None
        self._origin: int | None = None
        self._planned: tuple[int, list[list[int]]] = (-1, [])
        self.per_epoch = len(plan_epoch(self.lengths, batch_tokens, seeded(seed, _ORDER, 0)))

    def epoch_of(self, batch: int) -> float:
        """Passes over the data before batch number `batch`."""
        return batch / self.per_epoch

    def take(self, first: int, count: int, rank: int = 0, size: int = 1) -> Iterator[Batch]:
        """Of the batches `first` .. `first + count - 1`, those that are rank `rank`'s of `size`: every `size`-th. Numbers go on through all
        epochs, so every rank has as many as any other, whatever an epoch's number of batches."""
        for number in range(first + rank, first + count, size):
            yield self._make(number, size)

    def documents(self, batch: int) -> list[int]:
        """Numbers of the documents of a batch. A feed asks from its own thread."""
        epoch, index = divmod(batch, self.per_epoch)
        return self._plan(epoch)[index]

    def report(self) -> dict[str, Any]:
        """For metrics: seconds that training has waited for samples since this process began, and what a feed counts."""
        return {"waited": self.waited, **(self.store.report() if isinstance(self.store, SampleFeed) else {})}

    def endpoints(self) -> list[dict[str, Any]]:
        """The endpoints that samples come from, and how they do; none where they lie on a disk."""
        return self.store.endpoints() if isinstance(self.store, SampleFeed) else []

    @property
    def held(self) -> int | None:
        """Tokens that a feed holds or has asked for."""
        return self.store.held if isinstance(self.store, SampleFeed) else None

    def close(self) -> None:
        """End a feed's thread."""
        if isinstance(self.store, SampleFeed):
            self.store.close()

    def _plan(self, epoch: int) -> list[list[int]]:
        known, plan = self._planned
        if known != epoch:
            plan = plan_epoch(self.lengths, self.batch_tokens, seeded(self.seed, _ORDER, epoch))
            # All epochs count as many batches as the first, so that a batch number names an epoch:
            # a longer plan loses its last batches, a shorter one repeats some.
            plan = (plan + plan)[: self.per_epoch]
            self._planned = epoch, plan
        return plan

    def _samples(self, number: int, stride: int) -> list[HiddenSample]:
        started = time.monotonic()
        if isinstance(self.store, SampleFeed):
            samples = self._fetched(self.store, number, stride)
        else:
            samples = [self.store.get(self.keys[i]) for i in self.documents(number)]
        self.waited += time.monotonic() - started
        return samples

    def _fetched(self, feed: SampleFeed, number: int, stride: int) -> list[HiddenSample]:
        """A feed fetches consecutive numbers ahead: those of a rank's own batches, counted from the first one that was wanted."""
        if self._origin is None:
            self._origin = number if stride > 1 else 0
            if self.stop is not None:
                feed.stop = max(0, -(-(self.stop - self._origin) // stride))
        origin = self._origin
        return feed.take((number - origin) // stride, lambda n: self.documents(origin + n * stride))

    def _make(self, number: int, stride: int) -> Batch:
        samples = self._samples(number, stride)
        eligible = [eligible_anchors(s.loss_mask) for s in samples]
        return pack(samples, sample_anchors(eligible, self.anchors, seeded(self.seed, _ANCHORS, number)), self.layout)


def held_out_batches(store: HiddenStore, keys: Sequence[str], layout: BlockLayout, *, batch_tokens: int) -> list[Batch]:
    """Validation batches: every eligible anchor of each document, documents in order."""
    return list(eval_batches((store.get(k) for k in keys), batch_tokens, None, layout))
