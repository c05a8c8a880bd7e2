"""A tiny random Qwen3.5 in a folder, with the tokenizer of the tiny chat model and, on wish, an MTP head in its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_target import save_tiny_target
from torch import Tensor
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from firesteel.drafters.registry import get_spec

SHAPES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
}


def save_hybrid_target(folder: Path, *, head: bool = True, vocab: int = 96) -> Path:
    save_tiny_target(folder, vocab=vocab)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(1)
    model: Any = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPES, vocab_size=vocab, eos_token_id=2, bos_token_id=None, pad_token_id=0))
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    if head:
        file = folder / "model.safetensors"
        save_file({**load_file(file), **native_head(model)}, file, metadata={"format": "pt"})
    return folder


def native_head(model: Any) -> dict[str, Tensor]:
    """`mtp.*` of random weights, in the shapes of the model's own last layer."""
    layer = model.model.layers[-1].state_dict()
    shapes = {"fc.weight": (32, 64), "pre_fc_norm_embedding.weight": (32,), "pre_fc_norm_hidden.weight": (32,), "norm.weight": (32,)}
    shapes |= {f"layers.0.{name}": tuple(t.shape) for name, t in layer.items()}
    assert get_spec("mtp").stitch == "mtp."
    return {f"mtp.{name}": torch.randn(shape) * (0.1 if len(shape) == 1 else 0.15) for name, shape in shapes.items()}
