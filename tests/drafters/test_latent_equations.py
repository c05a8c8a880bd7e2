"""Latent attention against its equations, one number at a time, and against Transformers' DeepSeek-V3 layer."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from block_cases import make_batch, make_tables
from latent_cases import ANCHORS, LENGTHS, TINY, VARIANTS, make_drafter
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from firesteel.batches.batch import Batch
from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.latent import LatentDrafter, LatentLayer


def frequencies(config: DraftConfig) -> tuple[list[float], float, float]:
    """Radians per position of each pair, the factor on cosine and sine, and the factor on scores; as vLLM 0.32's `deepseek_yarn`."""
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if scaling is None:
        return plain, 1.0, 1.0
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_that_turns(32)), 0), min(math.ceil(pair_that_turns(1)), dim - 1)
    slow = [min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(dim // 2)]
    turns = [f * (1 - s) + f / factor * s for f, s in zip(plain, slow, strict=True)]

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    whole = magnitude(scaling.get("mscale_all_dim", 0.0))
    return turns, magnitude(scaling.get("mscale", 1.0)) / whole, whole**2


def turned(x: Tensor, position: int, config: DraftConfig) -> Tensor:
    """Neighbouring numbers are one complex number, turned by position times its frequency."""
    turns, magnitude, _ = frequencies(config)
    out = x.clone()
    for i, frequency in enumerate(turns):
        number = complex(float(x[2 * i]), float(x[2 * i + 1])) * cmath.exp(1j * position * frequency) * magnitude
        out[2 * i], out[2 * i + 1] = number.real, number.imag
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def expected_block(drafter: LatentDrafter, batch: Batch, embed: Tensor, number: int) -> Tensor:
    """Final states `[g, h]` of one block; every sum of attention is a loop."""
    config, state = drafter.config, {k: v.detach() for k, v in drafter.state_dict().items()}
    eps, heads, g = config.rms_norm_eps, config.num_heads, config.block_size
    nope, value, rank = config.extra["qk_nope_head_dim"], config.extra["v_head_dim"], config.extra["kv_lora_rank"]
    correction = frequencies(config)[2]
    anchor = int(batch.anchors[number])
    seen = [t for t in range(anchor) if batch.document[t] == batch.document[anchor]]
    context = [norm(state["context_proj.weight"] @ batch.context[t], state["context_norm.weight"], eps) for t in seen]
    ids = [int(batch.token_ids[anchor])] + [config.mask_token_id] * (g - 1)
    x, start = [embed[i] for i in ids], int(batch.position[anchor])
    for number_of_layer in range(config.num_layers):
        w = {k.removeprefix(f"layers.{number_of_layer}."): v for k, v in state.items() if k.startswith(f"layers.{number_of_layer}.")}
        y = [norm(one, w["input_layernorm.weight"], eps) for one in x]
        sources = [(c, int(batch.position[t])) for c, t in zip(context, seen, strict=True)] + [(one, start + k) for k, one in enumerate(y)]
        up = w["self_attn.kv_b_proj.weight"].view(heads, nope + value, rank)
        latents = []
        for u, position in sources:
            both = w["self_attn.kv_a_proj_with_mqa.weight"] @ u
            latents.append((norm(both[:rank], w["self_attn.kv_a_layernorm.weight"], eps), turned(both[rank:], position, config)))
        for k in range(g):
            q = w["self_attn.q_b_proj.weight"] @ norm(w["self_attn.q_a_proj.weight"] @ y[k], w["self_attn.q_a_layernorm.weight"], eps)
            mixed = []
            for head, query in enumerate(q.view(heads, -1)):
                plain, rotated = query[:nope], turned(query[nope:], start + k, config)
                scores = torch.stack([(plain @ (up[head, :nope] @ c) + rotated @ r) * correction / (nope + config.head_dim) ** 0.5 for c, r in latents])
                mixed.append(sum(p * (up[head, nope:] @ c) for p, (c, _) in zip(scores.softmax(0), latents, strict=True)))
            x[k] = x[k] + w["self_attn.o_proj.weight"] @ torch.cat(mixed)  # type: ignore[arg-type]
        for k in range(g):
            z = norm(x[k], w["post_attention_layernorm.weight"], eps)
            x[k] = x[k] + w["mlp.down_proj.weight"] @ (F.silu(w["mlp.gate_proj.weight"] @ z) * (w["mlp.up_proj.weight"] @ z))
    return torch.stack([norm(one, state["final_norm.weight"], eps) for one in x])


@pytest.mark.parametrize("name", ["plain", "yarn", "yarn-without-mscale", "wide-values"])
def test_training_computes_the_equations(name: str) -> None:
    config = VARIANTS[name]
    drafter, (embed, _, _) = make_drafter(config), make_tables(config, dtype=torch.float64)
    batch = make_batch(config, LENGTHS, ANCHORS, dtype=torch.float64)
    with torch.no_grad():
        found = {path: drafter.states(batch, embed, path) for path in ("dense", "fast", "flex")}  # type: ignore[arg-type]
    for number in range(len(ANCHORS)):
        wanted = expected_block(drafter, batch, embed, number)
        for states in found.values():
            torch.testing.assert_close(states[number], wanted, rtol=1e-5, atol=1e-5)  # tables of angles are float32


def test_rows_are_the_logits_of_the_heads() -> None:
    drafter, (embed, head, _) = make_drafter(TINY), make_tables(TINY, dtype=torch.float64)
    batch = make_batch(TINY, LENGTHS, ANCHORS, dtype=torch.float64)
    with torch.no_grad():
        rows, z = drafter.training_rows(batch, embed, head), drafter.states(batch, embed)
        logits = torch.stack([r @ w.T for r, w in rows.pieces]).sum(0).view(len(ANCHORS), 4, 50)
        w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    assert rows.confidence_logits is not None
    for n, anchor in enumerate(ANCHORS):
        for k in range(4):
            if batch.slots[n, k] < 0:
                continue
            e = w1[batch.token_ids[anchor + k]]
            torch.testing.assert_close(logits[n, k], head @ z[n, k] + w2 @ e)
            assert drafter.confidence_head is not None
            wanted = drafter.confidence_head.proj.weight[0] @ torch.cat([z[n, k], e]) + drafter.confidence_head.proj.bias[0]
            torch.testing.assert_close(rows.confidence_logits[n, k], wanted)


@pytest.mark.parametrize("name", ["plain", "yarn"])
def test_a_block_without_context_is_a_layer_of_deepseek_v3(name: str) -> None:
    """Transformers' own attention, with the weights of ours by the same names and nothing masked."""
    config = replace(VARIANTS[name], num_layers=1, layer_types=(FULL,))
    drafter = make_drafter(config)
    layer = drafter.layers[0]
    assert isinstance(layer, LatentLayer)
    rope: dict[str, Any] = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    theirs = DeepseekV3Config(
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        rope_parameters=rope,
        max_position_embeddings=64,
    )
    theirs._attn_implementation = "eager"
    attention = DeepseekV3Attention(theirs, 0).double()
    attention.load_state_dict(layer.self_attn.state_dict())
    y = torch.randn(1, 4, 24, dtype=torch.float64)
    positions = torch.arange(4)
    with torch.no_grad():
        wanted, _ = attention(y, DeepseekV3RotaryEmbedding(theirs)(y, positions[None]), None)
        keys, values = layer.self_attn.keys_values(y[0], drafter.rope.table(positions, torch.float64))
        queries = layer.self_attn.queries(y[0], drafter.rope.table(positions, torch.float64))
        weights = (torch.einsum("qhd,khd->hqk", queries, keys) * 10**-0.5).softmax(-1)
        found = torch.einsum("hqk,khd->qhd", weights, values).flatten(1) @ layer.self_attn.o_proj.weight.T
    torch.testing.assert_close(found, wanted[0], rtol=1e-5, atol=1e-5)
