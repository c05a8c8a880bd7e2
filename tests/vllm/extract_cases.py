"""A tiny random Llama that vLLM's CPU build serves, documents for it, and its states by Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, POSITIONS, LAYERS = 160, 512, 4
LAYER_IDS = (1, 2, 4)
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def save_served_target(folder: Path, *, seed: int = 0, layers: int = LAYERS) -> Path:
    """Write the model, with heads as wide as vLLM's attention on a CPU wants them; another seed gives other weights."""
    words = SPECIAL + ["system", "user", "assistant"] + [f"w{i}" for i in range(VOCAB - len(SPECIAL) - 3)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", additional_special_tokens=SPECIAL[1:])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        eos_token_id=2,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(8 if "layers" in name else 1)
            elif name == "model.norm.weight":  # not all ones, so that a norm too many or too few is seen
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


def document(length: int, seed: int) -> tuple[list[int], list[bool]]:
    """Random token ids and a loss mask with two supervised spans."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (length,), generator=g).tolist()
    mask = [(length // 4 <= i < length // 2) or i >= 3 * length // 4 for i in range(length)]
    return ids, mask


@torch.inference_mode()
def truth(model: Any, token_ids: list[int], layer_ids: tuple[int, ...] = LAYER_IDS) -> tuple[torch.Tensor, torch.Tensor]:
    """`[T, m, d]` captured states and `[T, d]` last states before the final norm, by Transformers in one pass."""
    before: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    states = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    layers = model.config.num_hidden_layers
    return torch.stack([before[0] if i == layers else states[i] for i in layer_ids], dim=-2)[0], before[0][0]
