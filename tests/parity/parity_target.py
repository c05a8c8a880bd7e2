"""The target of the comparisons with speculators: a small Llama, as facts for a drafter and as a folder for the peer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from firesteel.drafters.build import TargetFacts
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
