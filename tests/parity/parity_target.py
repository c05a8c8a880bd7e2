"""The target of the comparisons with speculators: a small Llama, as facts for a drafter and as a folder for the peer; and what a checkpoint must hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from firesteel.batches.vocab import DraftVocab
from firesteel.drafters.build import TargetFacts
from firesteel.drafters.registry import get_spec
from firesteel.package.convert.convert import read
from firesteel.package.load import LoadedDraft
from firesteel.target.head import TargetHead, make_head

VOCAB, HIDDEN = 97, 32


def save_target(folder: Path) -> TargetHead:
    """Write the model; returns its head."""
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        rope_theta=20000.0,
        tie_word_embeddings=False,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.model.norm.weight.uniform_(0.5, 1.5)
    model.lm_head.weight.normal_(std=0.4)
    model.save_pretrained(folder)
    return make_head(model, 1.0, None)


def facts() -> TargetFacts:
    """What a drafter takes from it."""
    return TargetFacts(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        rope_theta=20000.0,
        rope_scaling=None,
        max_position_embeddings=128,
        hidden_act="silu",
        num_layers=6,
    )


def same_checkpoint(loaded: LoadedDraft, drafter: Any, vocab: DraftVocab | None = None) -> None:
    """A checkpoint of the peer's says what the drafter's config says, and its tensors build the drafter, bit for bit."""
    ours = drafter.config
    shaping = {name: value for name, value in ours.extra.items() if name in loaded.config.extra}
    assert {"drop_ratio", "drop_floor", "selector_loss"} >= ours.extra.keys() - shaping.keys(), "wishes about training alone are not in the file"
    # Of heads that are not there a file says nothing, and the cases do not all tell the peer how long texts may be.
    free = {"extra": shaping, "confidence_with_markov": loaded.config.confidence_with_markov, "max_position_embeddings": loaded.config.max_position_embeddings}
    assert loaded.config == replace(ours, **free)
    assert loaded.contract is None
    assert read(loaded.folder, {}).config == loaded.config, "it is converted without a word about its fields"
    assert (loaded.target_ids is None) == (vocab is None)
    assert vocab is None or torch.equal(loaded.target_ids, vocab.target_ids)
    opened = get_spec(ours.algorithm).build(loaded.config)
    opened.load_state_dict(loaded.tensors)
    state = drafter.state_dict()
    assert state.keys() == loaded.tensors.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in opened.state_dict().items())
