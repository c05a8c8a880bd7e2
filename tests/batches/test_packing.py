"""Packing, against a reference that walks token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.batches.anchors import eligible_anchors, sample_anchors, seeded
from firesteel.batches.batch import Batch
from firesteel.batches.packing import BlockLayout, eval_batches, pack, plan_epoch
from firesteel.batches.vocab import DraftVocab
from firesteel.errors import HiddenStateError
from firesteel.hidden.sample import HiddenSample, predictable_positions

V, M, D = 20, 2, 3


def document(mask: Sequence[bool], seed: int, *, lognorm: bool = True, dtype: torch.dtype = torch.bfloat16) -> HiddenSample:
    g = torch.Generator().manual_seed(seed)
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    positions = predictable_positions(loss_mask)
    t, s = len(mask), len(positions)
    return HiddenSample(
        key=f"doc{seed}",
        token_ids=torch.randint(0, V, (t,), generator=g),
        loss_mask=loss_mask,
        aux=torch.randn(t, M, D, generator=g).to(dtype),
        last=torch.randn(s, D, generator=g).to(dtype),
        last_positions=positions,
        layer_ids=(1, 2),
        target="t",
        last_lognorm=torch.randn(s, generator=g) if lognorm else None,
    )


def reference(samples: Sequence[HiddenSample], anchors: Sequence[Tensor], layout: BlockLayout) -> dict[str, object]:
    """What `Batch` documents, one token at a time. Targets are kept per slot, by value."""
    out: dict[str, list] = {k: [] for k in ("document", "position", "context", "anchors", "slots", "weights", "labels", "lasts", "lognorms")}
    start, predicted = 0, set()
    for number, (s, chosen) in enumerate(zip(samples, anchors, strict=True)):
        for p in range(len(s)):
            out["document"].append(number)
            out["position"].append(p)
            out["context"].append([float(x) for layer in s.aux[p] for x in layer])
        for p in sorted(chosen.tolist()):
            out["anchors"].append(start + p)
            slots, weights, labels, lasts, lognorms = [], [], [], [], []
            alive = True
            for k in range(layout.block_size):
                ahead = k + 1 if layout.sample_from_anchor else k
                q = p + ahead
                if ahead == 0:
                    usable = False
                else:
                    alive = alive and q < len(s) and bool(s.loss_mask[q])
                    usable = alive
                if not usable:
                    slots.append(-1), weights.append(0.0), labels.append(-1), lasts.append(None), lognorms.append(None)
                    continue
                token, row = int(s.token_ids[q]), s.last_positions.tolist().index(q - 1)
                predicted.add(start + q - 1)
                slots.append(start + q)
                weights.append(float(layout.weights[k]))
                ids = list(range(V)) if layout.vocab is None else layout.vocab.target_ids.tolist()
                labels.append(ids.index(token) if token in ids else -1)
                lasts.append([float(x) for x in s.last[row]])
                lognorms.append(None if s.last_lognorm is None else float(s.last_lognorm[row]))
            for name, value in (("slots", slots), ("weights", weights), ("labels", labels), ("lasts", lasts), ("lognorms", lognorms)):
                out[name].append(value)
        start += len(s)
    return {**out, "predicted": sorted(predicted)}


def agree(batch: Batch, samples: Sequence[HiddenSample], anchors: Sequence[Tensor], layout: BlockLayout) -> None:
    want = reference(samples, anchors, layout)
    assert batch.token_ids.tolist() == [i for s in samples for i in s.token_ids.tolist()]
    assert batch.document.tolist() == want["document"]
    assert batch.position.tolist() == want["position"]
    assert batch.context.tolist() == want["context"]
    assert batch.context.dtype == batch.target_last.dtype == batch.weights.dtype == torch.float32
    assert batch.anchors.tolist() == want["anchors"]
    assert batch.slots.tolist() == want["slots"]
    assert batch.slots.shape == (len(batch.anchors), layout.block_size)
    assert batch.weights.tolist() == want["weights"]
    assert batch.draft_labels.tolist() == want["labels"]
    # Rows are the unique predicted positions in ascending order, and each slot's row is the state of its predecessor.
    assert batch.target_last.shape[0] == len(want["predicted"])
    assert sorted(set(batch.slot_target[batch.slots >= 0].tolist())) == list(range(len(want["predicted"])))
    for n, k in (batch.slots >= 0).nonzero().tolist():
        row = int(batch.slot_target[n, k])
        assert want["predicted"][row] == int(batch.slots[n, k]) - 1
        assert batch.target_last[row].tolist() == want["lasts"][n][k]
        if batch.target_lognorm is not None:
            assert float(batch.target_lognorm[row]) == want["lognorms"][n][k]
    assert bool((batch.slot_target[batch.slots < 0] == -1).all())
    assert (batch.target_lognorm is None) == any(s.last_lognorm is None for s in samples)
    for name in ("token_ids", "document", "position", "anchors", "slots", "slot_target", "draft_labels"):
        assert getattr(batch, name).dtype == torch.int64, name


def layout_of(g: int, sample_from_anchor: bool, reduced: bool = False) -> BlockLayout:
    vocab = DraftVocab(torch.tensor([0, 2, 3, 7, 11, 12, 19]), V) if reduced else None
    return BlockLayout(g, sample_from_anchor, torch.exp(-torch.arange(g) / 4), vocab)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=14), min_size=1, max_size=5),
    st.integers(2, 6),
    st.booleans(),
    st.booleans(),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.integers(1, 20),
)
def test_pack_against_the_reference(masks: list[list[bool]], g: int, anchor_mode: bool, reduced: bool, lognorms: list[bool], budget: int) -> None:
    samples = [document(m, i, lognorm=lognorms[i] or lognorms[0], dtype=[torch.bfloat16, torch.float32][i % 2]) for i, m in enumerate(masks)]
    layout = layout_of(g, anchor_mode, reduced)
    anchors = sample_anchors([eligible_anchors(s.loss_mask) for s in samples], budget, seeded(1))
    agree(pack(samples, anchors, layout), samples, anchors, layout)


@pytest.mark.parametrize("anchor_mode", [True, False])
def test_any_anchor_at_all_is_laid_out_rightly(anchor_mode: bool) -> None:
    """Also anchors that training would not choose: unsupervised ones and a document's last token; given in any order."""
    samples = [document([False, True, True, False, True, True], 1), document([True] * 4, 2)]
    anchors = [torch.tensor([5, 0, 3, 1, 2, 4]), torch.tensor([3, 2, 1, 0])]
    batch = pack(samples, anchors, layout_of(4, anchor_mode))
    agree(batch, samples, anchors, layout_of(4, anchor_mode))
    assert batch.slots[5].tolist() == [-1] * 4, "the last token of the first document does not predict the second document"


@pytest.mark.parametrize("anchor_mode", [True, False])
def test_teacher_forcing_reads_the_token_before_each_slot(anchor_mode: bool) -> None:
    samples = [document([False, True, True, True, False, True, True, True, True], 1), document([True] * 5, 2)]
    anchors = [eligible_anchors(s.loss_mask) for s in samples]
    batch = pack(samples, anchors, layout_of(4, anchor_mode))
    previous = batch.previous_tokens(anchor_mode)
    for n, k in (batch.slots >= 0).nonzero().tolist():
        assert int(previous[n, k]) == int(batch.token_ids[batch.slots[n, k] - 1])
    assert int((batch.slots >= 0).sum()) == (19 if anchor_mode else 18)


def test_a_batch_without_a_block_is_empty_and_whole() -> None:
    samples = [document([False, True], 1)]
    batch = pack(samples, [torch.empty(0, dtype=torch.int64)], layout_of(3, True))
    assert batch.slots.shape == batch.weights.shape == batch.slot_target.shape == batch.draft_labels.shape == (0, 3)
    assert batch.target_last.shape == (0, D)
    assert batch.context.shape == (2, M * D)


def test_shared_positions_are_gathered_once() -> None:
    sample = document([True] * 12, 1)
    batch = pack([sample], [eligible_anchors(sample.loss_mask)], layout_of(6, True))
    assert int((batch.slots >= 0).sum()) == 6 * 6 + 5 + 4 + 3 + 2 + 1
    assert batch.target_last.shape[0] == 11


def test_a_missing_target_state_names_the_sample() -> None:
    sample = document([True] * 6, 4)
    keep = sample.last_positions != 3
    sample.last, sample.last_positions, sample.last_lognorm = sample.last[keep], sample.last_positions[keep], None
    with pytest.raises(HiddenStateError, match="doc4"):
        pack([sample], [torch.tensor([1])], layout_of(4, True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=60), st.integers(16, 50), st.integers(0, 3))
def test_an_epoch_holds_each_document_once(lengths: list[int], size: int, seed: int) -> None:
    plan = plan_epoch(lengths, size, seeded(seed))
    assert sorted(d for batch in plan for d in batch) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) == 1 or sum(lengths[d] for d in batch) <= size
    # Best fit never leaves two batches that would go into one.
    loads = sorted(sum(lengths[d] for d in batch) for batch in plan)
    assert len(loads) < 2 or loads[0] + loads[1] > size


def test_an_epoch_wastes_little_and_is_shuffled() -> None:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(60, 500, (3000,), generator=g).tolist()
    plan = plan_epoch(lengths, 2048, seeded(0, 0))
    assert sum(lengths) / (len(plan) * 2048) > 0.97
    other = plan_epoch(lengths, 2048, seeded(0, 1))
    assert {frozenset(b) for b in plan} != {frozenset(b) for b in other}
    order = torch.tensor([d for b in plan for d in b]).float()
    assert abs(float(torch.corrcoef(torch.stack([order, torch.arange(3000.0)]))[0, 1])) < 0.1
    # Long documents do not gather at one end of the epoch.
    mean = torch.tensor([sum(lengths[d] for d in b) / len(b) for b in plan])
    half = len(plan) // 2
    assert abs(float(mean[:half].mean() - mean[half:].mean())) < 20


def test_a_run_resumes_at_any_batch_of_the_epoch() -> None:
    samples = [document([False] * 3 + [True] * (5 + i), i) for i in range(9)]
    layout = layout_of(4, True)

    def batches(first: int) -> list[Batch]:
        plan = plan_epoch([len(s) for s in samples], 30, seeded(7, 2))
        made = []
        for number in range(first, len(plan)):
            docs = [samples[d] for d in plan[number]]
            made.append(pack(docs, sample_anchors([eligible_anchors(s.loss_mask) for s in docs], 6, seeded(7, 2, number)), layout))
        return made

    whole, rest = batches(0), batches(2)
    assert len(whole) > 3
    for a, b in zip(whole[2:], rest, strict=True):
        for name in ("token_ids", "context", "anchors", "slots", "target_last", "draft_labels"):
            assert torch.equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("budget", [None, 7])
def test_evaluation_batches_are_frozen(budget: int | None) -> None:
    samples = [document([False] * 2 + [True] * (4 + i), i) for i in range(6)] + [document([False, True, False], 99)]
    layout = layout_of(4, False)
    made = list(eval_batches(iter(samples), 20, budget, layout))
    again = list(eval_batches(iter(samples), 20, budget, layout))
    assert [b.anchors.tolist() for b in made] == [b.anchors.tolist() for b in again]
    # In their order, without the one that has no block.
    assert torch.cat([b.token_ids for b in made]).tolist() == [i for s in samples[:-1] for i in s.token_ids.tolist()]
    assert all(len(b.token_ids) <= 20 for b in made)
    eligible = sum(len(eligible_anchors(s.loss_mask)) for s in samples)
    if budget is None:
        assert sum(len(b.anchors) for b in made) == eligible
    else:
        assert max(len(b.anchors) for b in made) == budget
    assert len(list(eval_batches(samples, 1, budget, layout))) == 6, "a long document is a batch of its own"
