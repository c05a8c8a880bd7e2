"""Tiny random targets of every family, of the real Transformers classes, with weights far enough from their start that nothing hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from firesteel.prompts.template import Document
from firesteel.target.head import TargetHead, decoder, make_head
from firesteel.target.local import LocalTarget
from firesteel.target.spec import TargetSpec, read_spec

VOCABULARY, WIDTH, LAYERS = 128, 32, 4
PICTURES = 124  # ids from here on stand for pictures and sounds in the nested targets
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Multi-head latent attention and DeepSeek's routing.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA_NET = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
    **ROUTED,
}
SLIDING = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA3 = {
    **SLIDING,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4 = {
    **SLIDING,
    "tie_word_embeddings": True,
    "global_head_dim": 16,
    "final_logit_softcapping": 3.0,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}


@dataclass(frozen=True)
class Family:
    """How to make a tiny target, and what must be read off it.

    Attributes:
        make: the untouched model.
        engine: the decoding engine that must take it.
        facts: fields of `TargetSpec` with the values they must have.
        tied: the head is the embedding.
        copies: None where a drafter can start from the target's layers, else what the refusal must name.
    """

    make: Callable[[], Any]
    engine: str
    facts: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    copies: str | None = None


def _causal(name: str, **extra: Any) -> Callable[[], Any]:
    config = "Gemma3Text" if name == "Gemma3" else "Gemma4Text" if name == "Gemma4" else f"{name}Text" if name.startswith("Qwen3_5") else name
    return lambda: getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{config}Config")(**{**SIZES, **extra}))


def _nested_gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**{**SIZES, **GEMMA3})
    vision = transformers.SiglipVisionConfig(**VISION)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, boi_token_index=125, eoi_token_index=126, image_token_index=127
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _nested_gemma4() -> Any:
    config = transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**{**SIZES, **GEMMA4}), image_token_id=127, video_token_id=126, audio_token_id=125
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def _nested_qwen() -> Any:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "out_hidden_size": WIDTH, "num_position_embeddings": 4}
    text = transformers.Qwen3_5MoeTextConfig(**{**SIZES, **DELTA_NET})
    config = transformers.Qwen3_5MoeConfig(
        text_config=text.to_dict(), vision_config=vision, image_token_id=127, video_token_id=126, vision_start_token_id=124, vision_end_token_id=125
    )
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def _nested_mistral() -> Any:
    text = transformers.MistralConfig(**{**SIZES, "head_dim": 8, "sliding_window": None})
    vision = transformers.PixtralVisionConfig(**VISION)
    return transformers.Mistral3ForConditionalGeneration(transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=127))


_KIMI = {
    **LATENT,
    "q_lora_rank": None,
    "num_local_experts": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_KIMI = {k: v for k, v in _KIMI.items() if k not in ("n_routed_experts", "first_k_dense_replace")}

_NO_MLP = "have no mlp.gate_proj.weight"
_NO_HEADS = "have no self_attn.q_proj.weight"
_GEMMA = {"embed_scale": WIDTH**0.5, "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e6}
_LATENT_FACTS = {"num_kv_heads": 4}

FAMILIES: dict[str, Family] = {
    "llama": Family(_causal("Llama", head_dim=8), "lean"),
    "qwen3": Family(_causal("Qwen3", head_dim=8, tie_word_embeddings=True), "lean", tied=True),
    "qwen3_moe": Family(_causal("Qwen3Moe", head_dim=8, **ROUTED), "generic", copies=_NO_MLP),
    "qwen3_5_moe": Family(_causal("Qwen3_5Moe", **DELTA_NET), "recurrent", {"norm_offset": 1.0, "rope_theta": 5e5}, copies=_NO_HEADS),
    "qwen3_5_moe_nested": Family(_nested_qwen, "recurrent", {"norm_offset": 1.0, "rope_theta": 5e5}, copies=_NO_HEADS),
    "gemma3": Family(_causal("Gemma3", **GEMMA3), "generic", {**_GEMMA, "norm_offset": 1.0, "softcap": 3.0}, tied=True, copies="pre_feedforward_layernorm"),
    # The class leaves out the cap that its config names.
    "gemma3_nested": Family(_nested_gemma3, "generic", {**_GEMMA, "norm_offset": 1.0}, tied=True, copies="pre_feedforward_layernorm"),
    "gemma4": Family(_causal("Gemma4", **GEMMA4), "generic", {**_GEMMA, "softcap": 3.0}, tied=True, copies="layer_scalar"),
    "gemma4_nested": Family(_nested_gemma4, "generic", {**_GEMMA, "softcap": 3.0}, tied=True, copies="layer_scalar"),
    "glm_moe_dsa": Family(_causal("GlmMoeDsa", **LATENT, index_topk=6, index_head_dim=16, index_n_heads=8), "generic", _LATENT_FACTS, copies=_NO_HEADS),
    "deepseek_v3": Family(_causal("DeepseekV3", **LATENT, rope_parameters=YARN), "generic", _LATENT_FACTS, copies=_NO_HEADS),
    "kimi_linear": Family(_causal("KimiLinear", **_KIMI), "recurrent", _LATENT_FACTS, copies="mlp.gate_proj"),
    "gpt_oss": Family(
        _causal("GptOss", **SLIDING, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2), "generic", {"intermediate_size": 64}, copies=_NO_MLP
    ),
    "mistral": Family(_causal("Mistral", head_dim=8, sliding_window=6), "generic"),
    "mistral_nested": Family(_nested_mistral, "lean", tied=True),
}


@dataclass
class Tiny:
    """A family's model with what is read off it, and a text: a prompt and what Transformers writes after it, `[PROMPT + NEW]`."""

    model: Any
    spec: TargetSpec
    head: TargetHead
    text: Tensor

    @property
    def local(self) -> LocalTarget:
        return LocalTarget(self.spec, self.model, None, self.head)


PROMPT, NEW = 12, 28


def make_model(family_name: str) -> Any:
    """The family's model, in evaluation mode, with every weight and lasting buffer moved off its start."""
    torch.manual_seed(3)
    model: nn.Module = FAMILIES[family_name].make()
    lasting = set(model.state_dict())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in lasting)]:
            if tensor.is_floating_point():
                # Small embeddings under large layers: otherwise a tied model repeats its input for ever.
                tensor.add_(torch.randn_like(tensor) * (0.1 if tensor.ndim == 1 else 0.25 if "layers." in name else 0.05))
    model.requires_grad_(False)
    return model.eval()


@torch.no_grad()
def write(model: Any, prompts: Tensor) -> Tensor:
    """`[B, PROMPT]` -> `[B, PROMPT + NEW]`: greedy decoding by Transformers."""
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=NEW)


@cache
def family(name: str) -> Tiny:
    """Made once for all tests, which leave it as it is."""
    model = make_model(name)
    spec = read_spec(model, name, (5,))
    prompts = torch.randint(PICTURES, (24, PROMPT), generator=torch.Generator().manual_seed(1))
    # A text that repeats itself proves little: of several prompts, the one with the most different tokens after it.
    plain = [row for row in write(model, prompts) if int(row.max()) < PICTURES]
    varied = max(plain, key=lambda row: len(set(row[PROMPT:].tolist())))
    text = write(model, varied[None, :PROMPT])[0]
    assert len(set(text[PROMPT:].tolist())) > 8, f"{name}: all texts repeat themselves"
    return Tiny(model, spec, make_head(model, spec.logit_scale, spec.softcap), text)


@torch.no_grad()
def own_states(model: Any, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """By Transformers alone: the streams before each layer and after the last, `LAYERS + 1` times `[T, d]`, and the logits `[T, V]`."""
    last = []
    handle = decoder(model).layers[-1].register_forward_hook(lambda _m, _a, out: last.append(out[0] if isinstance(out, tuple) else out))
    out = model(ids[None], output_hidden_states=True, use_cache=False)
    handle.remove()
    return [*(out.hidden_states[i][0] for i in range(LAYERS)), last[0].reshape(len(ids), -1)], out.logits[0]


def document(key: str, ids: Tensor) -> Document:
    """A document whose tokens from the fifth on are supervised."""
    return Document(ids.tolist(), [i >= 5 for i in range(len(ids))], key, (0,), ("stop",), "tiny", "tiny")


def check_close(found: Tensor, truth: Tensor, what: str = "") -> None:
    """Equal up to float32 rounding: 1e-4 of the largest value."""
    assert found.shape == truth.shape
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-4 * float(truth.abs().max()), msg=lambda m: f"{what}: {m}")
