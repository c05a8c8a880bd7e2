"""Tiny checkpoints in foreign layouts, built from the key names and fields that their projects publish."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from package_toys import TARGET
from safetensors.torch import save_file
from torch import Tensor

from firesteel.errors import FiresteelError
from firesteel.package.convert.convert import TargetTables, read
from firesteel.package.convert.fields import read_overrides
from firesteel.package.convert.foreign import Foreign

V, H, LAYERS, HEADS, KV, DIM, FFN, RANK = 40, 24, 2, 4, 2, 8, 40, 6
OUTPUTS = [0, 2, 3]  # 0-based layers whose output is taken: states before layers 1, 3, 4
QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "dtype": "float32",
    "head_dim": DIM,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": FFN,
    "layer_types": ["full_attention"] * LAYERS,
    "max_position_embeddings": 512,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 5000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": V,
}
MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
DEEPSPEC = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "mask_token_id": 39,
    "target_layer_ids": OUTPUTS,
    "num_anchors": 512,
    **MARKOV,
}
ZLAB = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 4,
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": OUTPUTS},
}
SPECFORGE = {
    **QWEN3,
    "architectures": ["DSparkDraftModel"],
    "block_size": 4,
    "dflash_config": {
        "attention_mode": "gqa",
        "mask_token_id": 39,
        "target_layer_ids": OUTPUTS,
        "projector_type": "dspark",
        "confidence_head_alpha": 1.0,
        **MARKOV,
    },
}
EAGLE3 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": FFN,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": V,
    "draft_vocab_size": 10,
}
MARKOV_SHAPES = {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (V, RANK)}
CONFIDENCE_SHAPES = {"confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)}
TABLES = {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}


def layer_shapes(prefix: str, *, width: int = H, heads: int = HEADS, kv: int = KV, qk_norm: bool = True) -> dict[str, tuple[int, ...]]:
    """Tensors of a decoder layer."""
    found: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * DIM, width),
        "self_attn.k_proj.weight": (kv * DIM, width),
        "self_attn.v_proj.weight": (kv * DIM, width),
        "self_attn.o_proj.weight": (H, heads * DIM),
        "mlp.gate_proj.weight": (FFN, H),
        "mlp.up_proj.weight": (FFN, H),
        "mlp.down_proj.weight": (H, FFN),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
    }
    if qk_norm:
        found |= {"self_attn.q_norm.weight": (DIM,), "self_attn.k_norm.weight": (DIM,)}
    return {prefix + name: shape for name, shape in found.items()}


def backbone_shapes() -> dict[str, tuple[int, ...]]:
    """A DFlash backbone."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(LAYERS):
        shapes |= layer_shapes(f"layers.{i}.")
    return shapes


def eagle_shapes() -> dict[str, tuple[int, ...]]:
    """SafeAILab's EAGLE-3, without tables."""
    own = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (10, H), "midlayer.hidden_norm.weight": (H,)}
    return own | layer_shapes("midlayer.", width=2 * H, heads=3, kv=1, qk_norm=False)


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) * (0.3 if len(shape) > 1 else 1.0) for name, shape in shapes.items()}


def vocabulary(ids: Sequence[int] = (0, 1, 3, 7, 8, 15, 20, 21, 38, 39)) -> dict[str, Tensor]:
    """`d2t` and `t2d` of these target ids."""
    at = torch.tensor(ids)
    marks = torch.zeros(V, dtype=torch.bool)
    marks[at] = True
    return {"d2t": at - torch.arange(len(ids)), "t2d": marks}


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def deepspec(folder: Path, **changes: Any) -> Path:
    return save(folder, DEEPSPEC | changes, random_tensors(backbone_shapes() | MARKOV_SHAPES | CONFIDENCE_SHAPES | TABLES))


def zlab(folder: Path, **changes: Any) -> Path:
    return save(folder, ZLAB | changes, random_tensors(backbone_shapes()))


def specforge(folder: Path, **changes: Any) -> Path:
    return save(folder, SPECFORGE | changes, random_tensors(backbone_shapes() | MARKOV_SHAPES | CONFIDENCE_SHAPES))


def eagle(folder: Path, tables: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    return save(folder, EAGLE3 | changes, random_tensors(eagle_shapes()) | (vocabulary() if tables is None else tables))


def target_tables(seed: int = 5) -> TargetTables:
    found = random_tensors({"embed": (V, H), "head": (V, H)}, seed)
    return TargetTables(TARGET, found["embed"], found["head"])


def opened(folder: Path, *overrides: str, target: TargetTables | None = None) -> Foreign:
    return read(folder, read_overrides(overrides), target)


def refused(folder: Path, *overrides: str, target: TargetTables | None = None) -> str:
    """The error's text; the file is named in it."""
    with pytest.raises(FiresteelError) as e:
        opened(folder, *overrides, target=target)
    assert str(folder) in str(e.value)
    return str(e.value)
