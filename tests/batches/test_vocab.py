"""The reduced vocabulary and its tables."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.batches.vocab import build_vocab, count_supervised, vocab_from_tables
from firesteel.errors import CheckpointError, DataError, RecipeError


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=30), st.data())
def test_against_a_plain_ranking(numbers: list[int], data: st.DataObject) -> None:
    v = len(numbers)
    always = data.draw(st.lists(st.integers(0, v - 1), max_size=3))
    size = data.draw(st.integers(max(1, len(set(always))), v))
    counts = torch.tensor(numbers)
    vocab = build_vocab(counts, size, always)
    rest = sorted(set(range(v)) - set(always), key=lambda i: (-numbers[i], i))
    wanted = sorted([*set(always), *rest[: size - len(set(always))]])
    assert vocab.target_ids.tolist() == wanted
    assert vocab.target_ids.dtype == torch.int64
    assert vocab.d2t.tolist() == [t - i for i, t in enumerate(wanted)]
    assert vocab.t2d.dtype == torch.bool
    assert vocab.t2d.tolist() == [i in wanted for i in range(v)]
    assert vocab.to_draft(torch.arange(v)[None]).tolist() == [[wanted.index(i) if i in wanted else -1 for i in range(v)]]
    assert vocab.coverage(counts) == (pytest.approx(sum(numbers[i] for i in wanted) / sum(numbers)) if sum(numbers) else 1.0)
    assert vocab_from_tables(vocab.d2t, vocab.t2d).target_ids.tolist() == wanted


def test_counting_only_what_is_supervised() -> None:
    documents = [(torch.tensor([1, 2, 2, 3]), torch.tensor([False, True, True, False])), (torch.tensor([2, 9]), torch.tensor([False, True]))]
    found = count_supervised(documents, 10)
    assert found.shape == (10,)
    assert Counter({i: n for i, n in enumerate(found.tolist()) if n}) == Counter({2: 2, 9: 1})
    with pytest.raises(DataError, match="document 1 has token ids from 9 to 9"):
        count_supervised(documents, 9)
    assert count_supervised([(torch.tensor([99]), torch.tensor([False]))], 4).tolist() == [0, 0, 0, 0]


def test_impossible_sizes_name_the_setting() -> None:
    counts = torch.ones(8, dtype=torch.int64)
    for size, always in ((9, []), (1, [2, 3]), (0, [])):
        with pytest.raises(RecipeError, match=r"drafter\.draft_vocab_size"):
            build_vocab(counts, size, always)
    for outside in (8, -1):
        with pytest.raises(RecipeError, match=f"end token {outside}"):
            build_vocab(counts, 4, [outside])
    assert build_vocab(counts, 8, [7]).d2t.tolist() == [0] * 8


def test_tables_in_a_foreign_order_keep_it() -> None:
    vocab = vocab_from_tables(torch.tensor([4, 0, 0], dtype=torch.int32), torch.tensor([0, 1, 1, 0, 1], dtype=torch.uint8))
    assert vocab.target_ids.tolist() == [4, 1, 2]
    assert vocab.to_draft(torch.tensor([4, 1, 2, 0])).tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([1, 3, 4], [False, True, False, True, True], "outside|several|disagree"),  # target ids in place of offsets: 1, 4, 6
        ([0, 0, 3], [True, True, False, False, False], "outside"),
        ([-1, 0, 0], [True, True, True, False, False], "outside"),
        ([1, 0, 0], [False, True, True, False, False], "several draft ids"),
        ([0, 0, 1], [True, True, True, False, False], "disagree about is 2"),
        ([0, 0, 1], [True, True, False, True, True], "disagree about is 4"),
        ([0, 0, 0], [0, 1, 2, 0, 0], "other than 0 and 1"),
        ([0.0, 0.0], [True, True], "row of offsets"),
        ([[0], [0]], [True, True], "row of offsets"),
        ([], [False], "row of offsets|outside"),
    ],
)
def test_tables_that_contradict_are_refused(d2t: list, t2d: list, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        vocab_from_tables(torch.tensor(d2t), torch.tensor(t2d))
