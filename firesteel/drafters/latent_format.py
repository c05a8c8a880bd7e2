"""Checkpoints of DSpark on multi-head latent attention: sizes, tensors and config.json as vLLM 0.32.0 loads `k3_dspark`.

The speculators format has no such layers, so config.json is vLLM's own (`transformers_utils/configs/k3_dspark.py`: a DeepseekV3Config with
no experts) with what its loader and its DSpark runner read beside it (`models/kimi_k3/nvidia/dspark_mla.py`). What that class turns off
(NoPE, output gate, q/k norms, a draft vocabulary, an anchor that only fills in) this backbone does not have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from firesteel import recipe as recipes
from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.keys import Key
from firesteel.drafters.layer_json import ReadStrictly
from firesteel.drafters.rope import rope_kind
from firesteel.errors import CheckpointError

MODEL_TYPE, ARCHITECTURE = "k3_dspark", "K3DSparkModel"
# Keys of YaRN that vLLM's `deepseek_yarn` takes; it knows no others, and no other scaled kind.
_YARN = frozenset({"rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})


@dataclass(frozen=True)
class LatentSizes:
    """Widths of one layer's attention: ranks of the two latents, and of a head's unrotated, rotated and value parts."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def key(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope + self.rope

    @property
    def latent(self) -> int:
        """What a server keeps of a position, per layer."""
        return self.kv_rank + self.rope


def is_latent(config: DraftConfig) -> bool:
    """Whether the drafter's layers are of this kind."""
    return bool(config.extra.get("backbone") == "mla")


def latent_options(settings: recipes.Drafter) -> dict[str, Any]:
    """`extra` of a config; `head_dim` of the config itself is the rotated part."""
    mla = settings.mla
    return {"backbone": "mla", "q_lora_rank": mla.q_lora_rank, "kv_lora_rank": mla.kv_lora_rank, "qk_nope_head_dim": mla.qk_nope_head_dim} | {
        "v_head_dim": mla.v_head_dim
    }


def latent_sizes(config: DraftConfig) -> LatentSizes:
    """The widths of a config.

    Raises:
        CheckpointError: one is missing or not a positive number.
    """
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    for name in names:
        value = config.extra.get(name)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{name} is {value!r}, not a positive number", mend=f"set drafter.mla.{name}")
    q_rank, kv_rank, nope, value = (int(config.extra[name]) for name in names)
    return LatentSizes(q_rank, kv_rank, nope, config.head_dim, value)


def latent_rope(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """A target's scaling of RoPE where this backbone has it too: YaRN as vLLM computes it; else None, plain RoPE."""
    return scaling if scaling is not None and _served_yarn(scaling) else None


def softmax_correction(config: DraftConfig) -> float:
    """DeepSeek's factor on scores under YaRN: `m^2`, `m = 0.1 mscale_all_dim ln(factor) + 1`; 1 without YaRN."""
    scaling = config.rope_scaling or {}
    factor = float(scaling.get("factor", 1.0))
    return (0.1 * float(scaling.get("mscale_all_dim", 0.0)) * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def check_latent(config: DraftConfig) -> None:
    """Refuse what this backbone does not have.

    Raises:
        CheckpointError: names the first such thing and the setting.
    """
    sizes, who = latent_sizes(config), "a drafter with latent attention (drafter.backbone=mla)"
    wrong: list[tuple[bool, str, str]] = [
        (config.mask_token_id is None, "needs a mask token", "set drafter.mask_token_id"),
        (set(config.layer_types) != {FULL}, "sees the whole context in every layer", "set drafter.attention=full"),
        (config.causal, "has blocks whose slots see each other", "leave out drafter.causal"),
        (not config.sample_from_anchor, "samples from the anchor", "leave out drafter.sample_from_anchor"),
        (config.reduced_vocab, "has the target's whole vocabulary", "leave out drafter.draft_vocab_size"),
        (config.markov_rank < 1, "has a Markov head", "set drafter.markov_rank higher"),
        (config.markov_head != "vanilla", f"has no {config.markov_head} Markov head", "set drafter.markov_head=vanilla"),
        (config.hidden_act != "silu", f"has no activation {config.hidden_act}", "its MLP is SwiGLU (silu)"),
        (config.num_kv_heads != config.num_heads, "has no groups of key heads", "leave out drafter.num_kv_heads"),
        (sizes.value > sizes.key, f"has values no wider than keys ({sizes.key})", "lower drafter.mla.v_head_dim"),
        (config.hidden_size != config.target_hidden_size, "has the target's hidden size, whose embedding it shares", "train it for this target"),
        (config.rope_scaling is not None and not _served_yarn(config.rope_scaling), f"has no RoPE {config.rope_scaling}", "use plain RoPE or YaRN"),
    ]
    for is_wrong, what, mend in wrong:
        if is_wrong:
            raise CheckpointError(f"{who} {what}", mend=mend)


def latent_keys(config: DraftConfig) -> dict[str, Key]:
    """Backbone and heads: the drafter's state dict."""
    s, h, heads, ff = latent_sizes(config), config.hidden_size, config.num_heads, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (h, len(config.layer_ids) * config.target_hidden_size),
        "context_norm.weight": (h,),
        "final_norm.weight": (h,),
        "markov_head.markov_w1.weight": (config.vocab_size, config.markov_rank),
        "markov_head.markov_w2.weight": (config.vocab_size, config.markov_rank),
    }
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_a_proj.weight": (s.q_rank, h),
        "self_attn.q_a_layernorm.weight": (s.q_rank,),
        "self_attn.q_b_proj.weight": (heads * s.key, s.q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (s.latent, h),
        "self_attn.kv_a_layernorm.weight": (s.kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (s.nope + s.value), s.kv_rank),
        "self_attn.o_proj.weight": (h, heads * s.value),
        "mlp.gate_proj.weight": (ff, h),
        "mlp.up_proj.weight": (ff, h),
        "mlp.down_proj.weight": (h, ff),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
    }
    shapes |= {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    keys = {name: Key(shape) for name, shape in shapes.items()}
    if config.confidence_head:
        width = h + config.markov_rank if config.confidence_with_markov else h
        keys |= {"confidence_head.proj.weight": Key((1, width), "float32"), "confidence_head.proj.bias": Key((1,), "float32")}
    return keys


class LatentFields(ReadStrictly):
    """config.json. Fields with one allowed value would change the network if they had another."""

    model_type: Literal["k3_dspark"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    target_hidden_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    markov_rank: int
    markov_head_type: Literal["vanilla"]
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    dtype: str | None = None
    torch_dtype: str | None = None
    num_speculative_tokens: int | None = None
    hidden_act: Literal["silu"] = "silu"
    mla_use_nope: Literal[False] = False
    mla_use_output_gate: Literal[False] = False
    mla_use_qk_norm: Literal[False] = False
    rope_interleave: Literal[True] = True
    attention_bias: Literal[False] = False
    n_routed_experts: Literal[0] = 0
    sample_from_anchor: Literal[True] = True
    dspark_bonus_anchor: Literal[False] = False
    is_causal: Literal[False] | None = None
    fc_norm: Literal[False] = False
    logit_scale: Literal[1] | None = None
    quantization_config: None = None


def latent_to_json(config: DraftConfig, *, dtype: str, speculative_tokens: int, target_layers: int) -> dict[str, Any]:
    """config.json of a drafter; `dtype` by name, `target_layers` of the target (other readers check layer ids against it)."""
    s = latent_sizes(config)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": s.q_rank,
        "kv_lora_rank": s.kv_rank,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rope,
        "v_head_dim": s.value,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "mla_use_qk_norm": False,
        "n_routed_experts": 0,
        "n_shared_experts": 0,
        "num_experts_per_tok": 0,
        "first_k_dense_replace": config.num_layers,
        "hidden_act": config.hidden_act,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
        "rope_interleave": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "is_causal": False,
        "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": target_layers,
        "num_target_layers": len(config.layer_ids),
        # vLLM adds one: its layer i is the state after layer i, which is Transformers' hidden_states[i + 1].
        "target_layer_ids": [i - 1 for i in config.layer_ids],
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "sample_from_anchor": True,
        "dspark_bonus_anchor": False,
        "num_speculative_tokens": speculative_tokens,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head and config.confidence_with_markov,
    }


def latent_from_json(own: LatentFields, where: str) -> dict[str, Any]:
    """Values of `DraftConfig`.

    Raises:
        CheckpointError: fields that contradict each other.
    """
    if own.num_target_layers != len(own.target_layer_ids):
        raise CheckpointError(f"{where}: num_target_layers is {own.num_target_layers}, target_layer_ids names {len(own.target_layer_ids)}")
    if own.dtype is None and own.torch_dtype is None:
        raise CheckpointError(f"{where}: dtype is missing", mend="state the precision of the weights")
    rope = dict(own.rope_parameters)
    theta = rope.pop("rope_theta", None)
    if not isinstance(theta, int | float) or isinstance(theta, bool):
        raise CheckpointError(f"{where}: rope_parameters.rope_theta is {theta!r}, not a number", mend="state it as the drafter was trained")
    return {
        "algorithm": "dspark",
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_layers": own.num_hidden_layers,
        "num_heads": own.num_attention_heads,
        "num_kv_heads": own.num_key_value_heads,
        "head_dim": own.qk_rope_head_dim,
        "vocab_size": own.vocab_size,
        "draft_vocab_size": own.draft_vocab_size,
        "target_hidden_size": own.target_hidden_size,
        "layer_ids": tuple(i + 1 for i in own.target_layer_ids),
        "block_size": own.block_size,
        "mask_token_id": own.mask_token_id,
        "sample_from_anchor": True,
        "layer_types": (FULL,) * own.num_hidden_layers,
        "rms_norm_eps": own.rms_norm_eps,
        "rope_theta": float(theta),
        "rope_scaling": None if rope_kind(rope) == "default" else rope,
        "max_position_embeddings": own.max_position_embeddings,
        "markov_rank": own.markov_rank,
        "confidence_head": own.enable_confidence_head,
        "confidence_with_markov": own.confidence_head_with_markov,
        "extra": {
            "backbone": "mla",
            "q_lora_rank": own.q_lora_rank,
            "kv_lora_rank": own.kv_lora_rank,
            "qk_nope_head_dim": own.qk_nope_head_dim,
            "v_head_dim": own.v_head_dim,
        },
    }


def latent_limits() -> list[str]:
    """What engines do not serve of it."""
    return ["vLLM 0.32 serves drafters with latent attention (`k3_dspark`) on GPUs only; Firesteel's own engine decodes them anywhere."]


def _served_yarn(scaling: dict[str, Any]) -> bool:
    """YaRN that Transformers and vLLM compute alike: they differ where only one of the two `mscale` is given."""
    has_length = {"factor", "original_max_position_embeddings"} <= scaling.keys()
    return rope_kind(scaling) == "yarn" and has_length and scaling.keys() <= _YARN and ("mscale" in scaling) == ("mscale_all_dim" in scaling)
