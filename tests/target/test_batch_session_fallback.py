"""A target that looks lean but is not in a detail is answered for by Transformers, in a batch as in a session."""

from __future__ import annotations

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from firesteel.target.batch import TransformersBatch, make_batch_session


def test_gated_attention_with_partial_rotary_falls_back() -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = Qwen3_5TextConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["full_attention"] * 2,
        rope_parameters=rope,
    )
    session = make_batch_session(Qwen3_5ForCausalLM(config).eval())
    assert isinstance(session, TransformersBatch)
    assert session.start([[1, 2, 3], [4, 5]], 2).shape == (2, 40)
