"""A tiny random chat model in a folder: a real Llama with a word-level tokenizer and a ChatML-like template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def save_tiny_target(folder: Path, *, seed: int = 0, vocab: int = 96, template: str | None = TEMPLATE) -> Path:
    """Write the model; another seed gives other weights."""
    words = SPECIAL + ["system", "user", "assistant"] + [f"w{i}" for i in range(vocab - len(SPECIAL) - 3)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", additional_special_tokens=SPECIAL[1:])
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=2,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Larger layers than the default's: otherwise a tied random model repeats its input for ever.
        for layer in model.model.layers:
            for parameter in layer.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int, *, start: int = 0) -> Path:
    """Distinct little prompts, some of two turns."""
    rows = []
    for i in range(start, start + count):
        text = " ".join(f"w{(7 * i + 3 * j * j + j) % 80}" for j in range(4 + i % 5))
        turns = [{"role": "user", "content": text}]
        if i % 4 == 0:
            turns.append({"role": "user", "content": f"w{i % 80} w{(i * i) % 80} w{(i + 40) % 80}"})
        rows.append({"messages": turns, "id": f"p{i}", "domain": "even" if i % 2 == 0 else "odd"})
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def recipe_settings(folder: Path, **sections: dict[str, object]) -> dict[str, object]:
    """A recipe that walks the whole line in seconds."""
    base: dict[str, dict[str, object]] = {
        "target": {"model": str(folder / "target"), "layer_ids": [1, 2, 4], "threads": 1, "cache_dir": str(folder / "cache")},
        "prompts": {
            "sources": [{"path": str(folder / "train.jsonl")}, {"path": str(folder / "eval.jsonl"), "split": "eval"}],
            "validation": 0.2,
            "max_tokens": 64,
        },
        "responses": {"max_new_tokens": 12, "batch_size": 8, "precision": "float32"},
        "hidden": {"codec": "fp32", "max_length": 96, "batch_tokens": 256},
        "drafter": {"block_size": 4, "num_layers": 1, "markov_rank": 8},
        "loss": {"ce": 1.0, "tv": 0.0},
        "train": {"max_steps": 12, "batch_tokens": 96, "anchors": 16, "validate_every": 6, "lr": 3e-3, "compile": False},
        "package": {"proof_prompts": 4},
        "evaluate": {"max_new_tokens": 10, "speed_prompts": 2, "speed_repeats": 1, "prompts_per_domain": 2, "bootstrap": 100},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return {"name": "tiny", "runs_dir": str(folder / "runs"), **base}
