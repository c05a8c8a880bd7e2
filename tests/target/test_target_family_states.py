"""Extraction and recomputed logits of every family against Transformers' own hidden states and logits."""

from __future__ import annotations

import pytest
import torch
from target_families import FAMILIES, LAYERS, SIZES, VOCABULARY, check_close, document, family, own_states
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from firesteel.stages.extract import capture_documents
from firesteel.target.batch import TransformersBatch
from firesteel.target.head import final_norm, make_head
from firesteel.target.reader import PaddedReader, make_reader
from firesteel.target.spec import read_spec

EVERY = tuple(range(LAYERS + 1))


@pytest.mark.parametrize("fast", [False, True], ids=["model", "fast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_extraction_equals_hidden_states(name, fast):
    """Three documents of unequal length in one pass, each against its own pass through the model."""
    tiny = family(name)
    documents = [document("a", tiny.text), document("b", tiny.text[:17]), document("c", tiny.text.flip(0)[:23])]
    samples = capture_documents(tiny.local, make_reader(tiny.model, EVERY) if fast else PaddedReader(tiny.model, EVERY), documents, EVERY)
    for text, sample in zip(documents, samples, strict=True):
        states, logits = own_states(tiny.model, torch.tensor(text.token_ids))
        for i in EVERY:
            check_close(sample.aux[:, i], states[i], f"layer {i}")
        at = sample.last_positions
        assert len(at) > 5
        check_close(sample.last, states[LAYERS][at])
        check_close(tiny.head.logits(sample.last), logits[at])
        check_close(sample.last_lognorm, logits[at].logsumexp(-1))
    assert float(logits.std()) > 0.1, "constant logits prove little"


@pytest.mark.parametrize("name", FAMILIES)
def test_last_entry_of_hidden_states_is_our_last_state_normed(name):
    tiny = family(name)
    with torch.no_grad():
        normed = tiny.model(tiny.text[None], output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    states, _ = own_states(tiny.model, tiny.text)
    check_close(tiny.head.states(states[LAYERS]), normed)
    assert not torch.allclose(states[LAYERS], normed, atol=1e-2)


@pytest.mark.parametrize("name", FAMILIES)
def test_batched_writing_equals_each_prompt_alone(name):
    """Left-padded rows of unequal length, and a row that leaves: what the target's answers are made with."""
    tiny = family(name)
    prompts = [tiny.text[:n].tolist() for n in (11, 5, 16)]
    session = TransformersBatch(tiny.model)
    logits = session.start(prompts)
    texts = [list(p) for p in prompts]
    for step in range(6):
        for row, text in zip(logits, texts, strict=True):
            check_close(row, own_states(tiny.model, torch.tensor(text))[1][-1])
        if step == 2:
            session.keep(torch.tensor([0, 2]))
            logits, texts = logits[[0, 2]], [texts[0], texts[2]]
        picked = logits.argmax(-1)
        for text, token in zip(texts, picked.tolist(), strict=True):
            text.append(token)
        logits = session.step(picked)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("rows", [VOCABULARY, 192], ids=["plain", "padded"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5_moe"])
def test_tied_and_untied_heads_with_padded_vocabularies(name, tied, rows):
    model = FAMILIES[name].make()
    model.config.tie_word_embeddings = tied
    if not tied:
        model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, model.config.hidden_size))
    else:
        model.lm_head.weight = model.get_input_embeddings().weight
    model.resize_token_embeddings(rows)
    model.eval().requires_grad_(False)
    spec = read_spec(model, name, (5,))
    head = make_head(model, spec.logit_scale, spec.softcap)
    assert spec.vocab_size == rows
    assert head.weight.shape == head.embed.shape == (rows, model.config.hidden_size)
    assert (head.weight.data_ptr() == head.embed.data_ptr()) == tied
    ids = torch.arange(rows - 10, rows)
    states, logits = own_states(model, ids)
    assert logits.shape == (10, rows)
    check_close(head.logits(states[LAYERS]), logits)


def test_tied_families_are_tied():
    for name, kind in FAMILIES.items():
        head = family(name).head
        assert (head.weight.data_ptr() == head.embed.data_ptr()) == kind.tied, name


def test_capture_leaves_no_hooks():
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    with pytest.raises(IndexError):
        capture_documents(_with_model(model), PaddedReader(model, EVERY), [document("a", torch.tensor([1, 2, 3, VOCABULARY]))], EVERY)
    assert not final_norm(model)._forward_pre_hooks
    assert not any(m._forward_pre_hooks for m in model.modules())


def _with_model(model):
    tiny = family("llama").local
    tiny.model = model
    return tiny
