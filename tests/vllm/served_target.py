"""A small Llama that counts: text that a drafter can learn to foresee, in shapes that vLLM's CPU attention takes (heads of 32)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<|mask|>", "user", "assistant"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
WORDS, STEPS = 58, 400


def save_counting_target(folder: Path) -> Path:
    """Write a model trained for seconds on sequences that go on in steps of their own, now and then disturbed."""
    words = SPECIAL + [f"w{i}" for i in range(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", additional_special_tokens=SPECIAL[1:])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        tokens = len(SPECIAL) + _sequences(16, 64)
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = functional.cross_entropy(logits.reshape(-1, len(words)), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


def _sequences(count: int, length: int) -> torch.Tensor:
    """Counting by 1 to 4; one token in sixteen is noise."""
    start, step = torch.randint(WORDS, (count, 1)), torch.randint(1, 5, (count, 1))
    tokens = (start + step * torch.arange(length)) % WORDS
    return torch.where(torch.rand(count, length) < 1 / 16, torch.randint(WORDS, (count, length)), tokens)


def write_counting_prompts(path: Path, count: int, *, start: int = 0) -> Path:
    """One turn each, between four and forty words, some of them disturbed."""
    rows = []
    for i in range(start, start + count):
        step, length = 1 + i % 4, 4 + (7 * i) % 37
        words = [f"w{(11 * i + step * j + (13 if j % 9 == 8 else 0)) % WORDS}" for j in range(length)]
        rows.append({"messages": [{"role": "user", "content": " ".join(words)}], "id": f"p{i}", "domain": "even" if i % 2 == 0 else "odd"})
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path
