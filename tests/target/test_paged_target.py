"""A target over blocks gives every sequence the logits and states of the model's own pass."""

from __future__ import annotations

import pytest
import torch
from small_sizes import SIZES
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from firesteel.errors import TargetError
from firesteel.kernels.spans import Span
from firesteel.target.paged import PagedTarget
from firesteel.target.session import TargetSession

MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config, model = MODELS[kind]
    return model(config(**SIZES)).eval()


@pytest.mark.parametrize("kind", MODELS)
def test_many_sequences_at_once_equal_each_alone(kind: str) -> None:
    model = make_model(kind)
    paged = PagedTarget(model, (1, 3), max_length=100, blocks=30)
    session = TargetSession(model, (1, 3), max_length=100, engine="generic")
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(60, (n,), generator=generator) for n in (50, 3, 21)]
    order = torch.randperm(30, generator=generator).tolist()
    tables = [order[:4], order[4:5], order[5:8]]
    length = [0, 0, 0]
    for counts in ([20, 1, 9], [0, 2, 1], [25, 0, 11], [5, 0, 0]):
        going = [i for i in range(3) if counts[i]]
        spans = [Span(i, tables[i], length[i], counts[i]) for i in going]
        keep = [min(2, s.count) for s in spans]
        tokens = torch.cat([texts[s.key][s.start : s.end] for s in spans])
        logits, aux = paged.forward(tokens, spans, keep)
        row = place = 0
        for span, rows in zip(spans, keep, strict=True):
            session.rewind(0)
            step = session.forward(texts[span.key][: span.end])
            torch.testing.assert_close(logits[row : row + rows], step.logits[-rows:], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(aux[place : place + span.count], step.aux[span.start :], rtol=1e-4, atol=1e-5)
            row, place = row + rows, place + span.count
            length[span.key] += span.count


def test_a_rewound_sequence_forgets_what_lay_behind() -> None:
    paged = PagedTarget(make_model("llama"), (2,), max_length=64, blocks=8)
    blocks = [3, 1]
    text = torch.arange(20)
    first, _ = paged.forward(text, [Span(0, blocks, 0, 20)], [20])
    paged.forward(torch.tensor([9, 9, 9, 9]), [Span(0, blocks, 12, 4)], [4])
    again, _ = paged.forward(text[12:], [Span(0, blocks, 12, 8)], [8])
    torch.testing.assert_close(again, first[12:], rtol=1e-4, atol=1e-5)


def test_other_targets_and_small_caches_are_refused() -> None:
    gemma = GemmaForCausalLM(GemmaConfig(**SIZES)).eval()
    with pytest.raises(TargetError, match="cannot run batched"):
        PagedTarget(gemma, (1,), max_length=64, blocks=8)
    with pytest.raises(TargetError, match="not even two short texts"):
        PagedTarget(make_model("llama"), (1,), max_length=64, blocks=2)


def test_forked_sessions_share_weights_and_nothing_else() -> None:
    for engine in ("lean", "generic"):
        first = TargetSession(make_model("llama"), (1,), max_length=32, engine=engine)  # type: ignore[arg-type]
        second = first.fork()
        wanted = first.forward([1, 2, 3]).logits
        second.forward([7, 8])
        assert (first.length, second.length) == (3, 2)
        first.rewind(2)
        torch.testing.assert_close(first.forward([3]).logits[0], wanted[2], rtol=1e-4, atol=1e-5)
