"""Tiny Qwen3.5 targets in folders, with and without an MTP head in their files, and exported heads for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from package_toys import TARGET
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.mtp_format import adapt_to_target, native_names, native_tensor
from firesteel.drafters.registry import get_spec
from firesteel.package.contract import Promise, make_contract
from firesteel.package.export import export

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}


def text_config(*, moe: bool = False) -> Any:
    return Qwen3_5MoeTextConfig(**SIZES, **EXPERTS) if moe else Qwen3_5TextConfig(**SIZES, intermediate_size=48)


def make_head_config(*, moe: bool = False) -> DraftConfig:
    plain = DraftConfig(
        algorithm="mtp",
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=40,
        draft_vocab_size=40,
        target_hidden_size=32,
        layer_ids=(LAYERS,),
        block_size=3,
        mask_token_id=None,
        sample_from_anchor=True,
        layer_types=(FULL,),
        causal=True,
        extra={"beta": 0.6, "norm_output": True},
    )
    return adapt_to_target(plain, text_config(moe=moe).to_dict(), LAYERS)


def head_tensors(config: DraftConfig, seed: int = 1) -> dict[str, Tensor]:
    """A head as state dict, norm of the target left out."""
    torch.manual_seed(seed)
    return {n: torch.randn(t.shape) * 0.3 for n, t in get_spec("mtp").build(config).state_dict().items() if n.startswith("mtp.")}


def save_target(folder: Path, *, moe: bool = False, head: bool = True, sharded: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """A random target; its head's experts lie one by one."""
    torch.manual_seed(0)
    model: Any = (Qwen3_5MoeForCausalLM if moe else Qwen3_5ForCausalLM)(text_config(moe=moe))
    model.model.norm.weight.data.uniform_(-0.3, 0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size="40KB" if sharded else "5GB")
    if not head:
        return folder
    state = head_tensors(make_head_config(moe=moe))
    native = {name: found[1].to(dtype).contiguous().clone() for name in native_names(state) if (found := native_tensor(name, state)) is not None}
    index = folder / "model.safetensors.index.json"
    file = folder / ("model.safetensors" if not sharded else sorted(set(json.loads(index.read_text())["weight_map"].values()))[-1])
    save_file({**load_file(file), **native}, file, metadata={"format": "pt"})
    if sharded:
        listed = json.loads(index.read_text())
        listed["weight_map"] |= dict.fromkeys(native, file.name)
        index.write_text(json.dumps(listed))
    return folder


def export_head(folder: Path, target: Path, *, moe: bool = False) -> Path:
    """A fine-tuned head (other weights than the target's own)."""
    config = make_head_config(moe=moe)
    spec = replace(TARGET, num_layers=LAYERS, hidden_size=32, vocab_size=40, norm_offset=1.0)
    norm = next(t for f in target.glob("*.safetensors") for n, t in load_file(f).items() if n == "model.norm.weight").float() + 1
    state = head_tensors(config, seed=2) | {"target_norm.weight": norm}
    promise = Promise(acceptance_length=1.5, rounds=10, accepted=5, draft_length=2, temperature=0.0, measured_on="nothing real")
    contract = make_contract(config, spec, template_options={}, temperatures=(), promise=promise, speculative_tokens=2)
    export(folder, state, config, contract, target_ids=None, head_rows=None, dtype=torch.float32)
    return folder
