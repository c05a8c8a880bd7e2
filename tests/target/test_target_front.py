"""A target of which only the ends are loaded is the same target; its layers come when they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from firesteel.errors import TargetError
from firesteel.recipe import Target
from firesteel.target.front import load_front
from firesteel.target.local import load_target

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}


def save_target(folder: Path, kind: str, tied: bool, shards: str = "5GB") -> Path:
    torch.manual_seed(0)
    config, model = (LlamaConfig, LlamaForCausalLM) if kind == "llama" else (GraniteConfig, GraniteForCausalLM)
    made = model(config(**SIZES, tie_word_embeddings=tied, eos_token_id=2))  # type: ignore[arg-type]
    with torch.no_grad():
        made.model.norm.weight.uniform_(0.5, 2)
    made.save_pretrained(folder, max_shard_size=shards)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0")), eos_token="w2")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "tied", "shards"), [("llama", True, "5GB"), ("llama", False, "5KB"), ("granite", False, "5GB")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ends_are_those_of_the_loaded_target(tmp_path: Path, kind: str, tied: bool, shards: str, dtype: str) -> None:
    settings = Target(model=str(save_target(tmp_path, kind, tied, shards)), dtype=dtype, device="cpu", threads=1)  # type: ignore[arg-type]
    front, whole = load_front(settings), load_target(settings)
    assert front is not None
    assert front.spec == whole.spec
    assert front.text_config == whole.text_config
    last = torch.randn(5, 16)
    assert torch.equal(front.head.logits(last), whole.head.logits(last))
    assert torch.equal(front.head.embed, whole.head.embed)
    assert not front.head.weight.requires_grad
    before = front.checksum()
    assert "model" not in vars(front)
    assert [torch.equal(a[n], b[n]) for a, b in zip(front.layer_weights(1, 2), whole.layer_weights(1, 2), strict=True) for n in a].count(False) == 0
    assert "model" in vars(front)
    assert front.checksum() == before
    with torch.no_grad():
        front.head.weight[0, 0] += 1
    assert front.checksum() != before


def test_files_with_names_of_their_own_are_left_to_a_full_load(tmp_path: Path) -> None:
    folder = save_target(tmp_path, "llama", False)
    tensors = load_file(folder / "model.safetensors")
    save_file({n.replace("mlp", "feed_forward"): t for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_front(Target(model=str(folder), device="cpu", threads=1)) is None


def test_layers_that_changed_since_are_not_taken(tmp_path: Path) -> None:
    folder = save_target(tmp_path, "llama", True)
    front = load_front(Target(model=str(folder), device="cpu", threads=1))
    assert front is not None
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.0.mlp.up_proj.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="when loaded"):
        _ = front.model
