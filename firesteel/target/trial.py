"""A random Llama of given sizes, to measure a machine with: no weights are needed to know how fast they would be multiplied."""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from firesteel.target.head import TargetHead, make_head
from firesteel.target.reader import make_reader


def trial_model(*, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, layers: int, vocab: int) -> LlamaForCausalLM:
    """A frozen model in float32 with tied tables."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def trial_head(model: LlamaForCausalLM) -> TargetHead:
    """Its final norm and head, as a drafter is trained against."""
    return make_head(model, 1.0, None)


def prefill_seconds(model: LlamaForCausalLM, documents: int, length: int, layer_ids: tuple[int, ...], *, half: bool, repeats: int = 3) -> tuple[float, float]:
    """Seconds of reading documents of equal length as the local engine does: (the layers, with states captured; the head, for the normalisers).

    The least of some repeats each.
    """
    reader, head = make_reader(model, layer_ids, half=half), trial_head(model)
    texts = torch.randint(model.config.vocab_size, (documents, length), generator=torch.Generator().manual_seed(0)).tolist()
    layers, normalisers = [], []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            started = time.perf_counter()
            found = reader(texts)
            read = time.perf_counter()
            for _, last in found:
                head.logits(last).logsumexp(-1)
            layers.append(read - started)
            normalisers.append(time.perf_counter() - read)
    return min(layers[1:]), min(normalisers[1:])
