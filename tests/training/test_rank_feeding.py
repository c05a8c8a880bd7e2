"""What every rank is given: its own batches, from a store or a feed of its own, and nothing twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from parallel_cases import LAYERS, make_job, samples

from firesteel.batches.batch import Batch
from firesteel.endpoints.roster import Roster, write_urls
from firesteel.hidden.feed import SampleFeed, Work
from firesteel.hidden.sample import HiddenSample, check_sample
from firesteel.recipe import Feed, Train
from firesteel.stages.stream import last_batch
from firesteel.training.data import BatchSource

DOCUMENTS = samples(11)
WORKS = [Work(s.key, s.token_ids.tolist(), s.loss_mask.tolist()) for s in DOCUMENTS]


@contextmanager
def fed(like: BatchSource, asked: list[str]) -> Iterator[BatchSource]:
    """The same batches, from a feed."""
    by_key = {s.key: s for s in DOCUMENTS}

    async def fetch(endpoint: str, work: Work) -> HiddenSample:
        asked.append(work.key)
        return by_key[work.key]

    feed = SampleFeed(fetch, WORKS, Roster(["a"]), Feed(timeout=20.0), step_tokens=96, check=lambda s: check_sample(s, layer_ids=LAYERS, target="toy"))
    with feed:
        yield BatchSource(feed, like.keys, like.lengths, like.layout, batch_tokens=like.batch_tokens, anchors=like.anchors, seed=like.seed)


def same(a: Batch, b: Batch) -> bool:
    return a.token_ids.equal(b.token_ids) and a.anchors.equal(b.anchors) and a.context.equal(b.context)


@pytest.mark.parametrize(("first", "size"), [(0, 2), (0, 3), (3, 2)], ids=["two", "three", "resumed from one process at an odd batch"])
def test_ranks_share_the_batches_of_every_step(first: int, size: int, tmp_path: Path) -> None:
    """Steps of `2 * size` batches, from a store and from feeds of their own; an epoch's number of batches is divided by none of them."""
    source = make_job(tmp_path).source
    steps = [first + 2 * size * i for i in range(3)]
    for rank in range(size):
        asked: list[str] = []
        with fed(source, asked) as streamed:
            streamed.stop = steps[-1] + 2 * size
            for start in steps:
                wanted = [next(source.take(number, 1)) for number in range(start + rank, start + 2 * size, size)]
                stored, found = list(source.take(start, 2 * size, rank, size)), list(streamed.take(start, 2 * size, rank, size))
                assert len(stored) == len(found) == 2
                assert all(same(a, b) and same(a, c) for a, b, c in zip(wanted, stored, found, strict=True))
            time.sleep(0.05)
        own = [number for start in steps for number in range(start + rank, start + 2 * size, size)]
        assert sorted(asked) == sorted(WORKS[d].key for number in own for d in source.documents(number)), "nothing beyond the end, nothing of others"


def test_the_end_of_a_run_counts_all_ranks_batches() -> None:
    assert last_batch(Train(max_steps=5, accumulate=2), 7) == 10
    assert last_batch(Train(max_steps=5, accumulate=2), 7, 3) == 30
    assert last_batch(Train(epochs=1), 7, 2) == 8
    assert last_batch(Train(max_minutes=1), 7, 2) is None


def test_groups_of_endpoints(tmp_path: Path) -> None:
    urls = [f"http://{c}" for c in "abcde"]
    assert [Roster(urls, part=(g, 2)).read() for g in range(2)] == [urls[:2], urls[2:]]
    assert Roster(urls).read() == urls
    assert Roster(urls[:1], part=(0, 2)).read() == urls[:1], "a group without endpoints asks all"
    file = tmp_path / "endpoints.txt"
    roster = Roster(urls, file, part=(1, 2))
    assert roster.read() == urls[2:]
    write_urls(file, urls[:4])
    assert roster.read() == urls[2:4]


def test_a_rank_repeats_no_batch_of_another(tmp_path: Path) -> None:
    source = make_job(tmp_path).source
    taken = [b.token_ids for rank in range(3) for b in source.take(0, 3, rank, 3)]
    assert len(taken) == 3
    assert all(not torch.equal(a, b) for i, a in enumerate(taken) for b in taken[:i])
