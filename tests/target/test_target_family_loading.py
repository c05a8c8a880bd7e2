"""Targets from folders: the right class with all its weights, the tokens that end a text, and the token that masks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from target_families import FAMILIES, VOCABULARY, check_close, family, make_model
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from firesteel import recipe as recipes
from firesteel.errors import TargetError
from firesteel.target.loading import eos_ids, load_model
from firesteel.target.mask import pick_mask_token
from firesteel.target.spec import fingerprint


def settings(path, **more) -> recipes.Target:
    return recipes.Target(model=str(path), device="cpu", **more)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_target_is_the_same_target(name, tmp_path):
    tiny = family(name)
    tiny.model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), settings(tmp_path))
    with torch.no_grad():
        check_close(loaded(tiny.text[None]).logits, tiny.model(tiny.text[None]).logits)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    # A multimodal target may come as its text model alone, which has other names and is another target to the fingerprint.
    if type(loaded) is type(tiny.model):
        assert fingerprint(loaded) == tiny.spec.fingerprint
    else:
        assert name == "qwen3_5_moe_nested"


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe_nested", "glm_moe_dsa"])
def test_weights_that_are_not_there_are_named(name, tmp_path):
    make_model(name).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = sorted(n for n in tensors if "layers.2" in n)[0]
    save_file({n: t for n, t in tensors.items() if n != gone}, file, {"format": "pt"})
    with pytest.raises(TargetError, match=r"1 weights are not in its files, the first .*layers\.2") as caught:
        load_model(str(tmp_path), settings(tmp_path))
    assert "fetch the folder again" in str(caught.value)


def test_a_config_of_another_architecture_is_noticed(tmp_path):
    """Weights under other names would leave the model random, and everything after that would run."""
    make_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"8 weights are not in its files, the first .*k_norm"):
        load_model(str(tmp_path), settings(tmp_path))


def test_a_nested_config_without_text_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip_vision_model"}))
    with pytest.raises(TargetError, match="cannot be loaded"):
        load_model(str(tmp_path), settings(tmp_path))


@pytest.mark.parametrize("name", ["gemma3_nested", "gemma4_nested", "qwen3_5_moe_nested", "mistral_nested"])
def test_eos_of_nested_configs(name):
    model = FAMILIES[name].make()
    model.generation_config = GenerationConfig()
    model.config.get_text_config().eos_token_id = [7, 11]
    tokenizer = SimpleNamespace(eos_token_id=9)
    assert {7, 9, 11} <= set(eos_ids(model, tokenizer))
    model.generation_config.eos_token_id = 13
    assert {7, 9, 11, 13} <= set(eos_ids(model, tokenizer))


def tokenizer_with(*special: str, words: int = 20, **named: str) -> PreTrainedTokenizerFast:
    every = [f"w{i}" for i in range(words)]
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({w: i for i, w in enumerate([*every, *special])}, unk_token="w0")), **named)
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def test_a_padded_vocabulary_gives_a_row_that_no_text_has():
    tokenizer = tokenizer_with("<end>", eos_token="<end>")
    assert pick_mask_token(tokenizer, VOCABULARY, (20,)) == VOCABULARY - 1
    assert len(tokenizer) < VOCABULARY


@pytest.mark.parametrize(
    ("special", "named", "eos", "wanted"),
    [
        (("<end>", "<|fim|>"), {"mask_token": "<|fim|>"}, ("<end>",), "<|fim|>"),
        # Qwen, Gemma, GLM, Kimi and DeepSeek name tokens that nothing uses so.
        (("<end>", "<unused7>", "<|vision_pad|>"), {}, ("<end>",), "<unused7>"),
        (("<end>", "<|reserved_special_token_4|>"), {}, ("<end>",), "<|reserved_special_token_4|>"),
        (("<|place▁holder▁no▁1|>", "<end>", "<|User|>"), {}, ("<end>",), "<|place▁holder▁no▁1|>"),
        (("<end>", "[PAD]", "<|image|>"), {"pad_token": "[PAD]"}, ("<end>",), "[PAD]"),
        # A padding token that also ends texts is none.
        (("<end>", "<|user|>"), {"pad_token": "<end>"}, ("<end>",), "<|user|>"),
        (("<end>", "<|begin|>"), {"bos_token": "<|begin|>", "unk_token": "w0"}, ("<end>",), "w0"),
    ],
)
def test_mask_token_of_full_vocabularies(special, named, eos, wanted):
    tokenizer = tokenizer_with(*special, eos_token="<end>", **named)
    ids = tuple(tokenizer.convert_tokens_to_ids(list(eos)))
    picked = pick_mask_token(tokenizer, len(tokenizer), ids)
    assert tokenizer.convert_ids_to_tokens(picked) == wanted
    assert picked not in ids


def test_no_token_is_free():
    tokenizer = tokenizer_with("<end>", eos_token="<end>")
    tokenizer.unk_token = None
    with pytest.raises(TargetError, match=r"drafter\.mask_token_id"):
        pick_mask_token(tokenizer, len(tokenizer), tuple(tokenizer.convert_tokens_to_ids(["<end>"])))
