"""Where training batches come from: the stored samples, in an order that only the seed decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from firesteel.batches.anchors import eligible_anchors, sample_anchors, seeded
from firesteel.batches.batch import Batch
from firesteel.batches.packing import BlockLayout, eval_batches, pack, plan_epoch
from firesteel.hidden.stores import HiddenStore

_ORDER, _ANCHORS = 0, 1  # what a random stream is for


class BatchSource:
    """Batch number b of a run, for any b: the seed and b fix its documents and anchors, so resuming needs no random state.

    Args:
        lengths: tokens of each document in `keys`.
        batch_tokens: tokens of a batch at most.
        anchors: blocks of a batch at most.
    """

    def __init__(
        self, store: HiddenStore, keys: Sequence[str], lengths: Sequence[int], layout: BlockLayout, *, batch_tokens: int, anchors: int, seed: int
    ) -> None:
        self.store, self.keys, self.lengths, self.layout, self.seed = store, list(keys), list(lengths), layout, seed
        self.batch_tokens, self.anchors = batch_tokens, anchors
        self._planned: tuple[int, list[list[int]]] = (-1, [])
        self.per_epoch = len(plan_epoch(self.lengths, batch_tokens, seeded(seed, _ORDER, 0)))

    def epoch_of(self, batch: int) -> float:
        """Passes over the data before batch number `batch`."""
        return batch / self.per_epoch

    def take(self, first: int, count: int) -> Iterator[Batch]:
        """Batches `first` .. `first + count - 1`."""
        for number in range(first, first + count):
            yield self._make(number)

    def _plan(self, epoch: int) -> list[list[int]]:
        if self._planned[0] != epoch:
            plan = plan_epoch(self.lengths, self.batch_tokens, seeded(self.seed, _ORDER, epoch))
            # All epochs count as many batches as the first, so that a batch number names an epoch:
            # a longer plan loses its last batches, a shorter one repeats some.
            self._planned = epoch, (plan + plan)[: self.per_epoch]
        return self._planned[1]

    def _make(self, number: int) -> Batch:
        epoch, index = divmod(number, self.per_epoch)
        samples = [self.store.get(self.keys[i]) for i in self._plan(epoch)[index]]
        eligible = [eligible_anchors(s.loss_mask) for s in samples]
        return pack(samples, sample_anchors(eligible, self.anchors, seeded(self.seed, _ANCHORS, number)), self.layout)


def held_out_batches(store: HiddenStore, keys: Sequence[str], layout: BlockLayout, *, batch_tokens: int) -> list[Batch]:
    """Validation batches: every eligible anchor of each document, documents in order."""
    return list(eval_batches((store.get(k) for k in keys), batch_tokens, None, layout))
