"""TargetSpec: what must be known of a frozen target, read from its config and weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firesteel.errors import RecipeError, TargetError
from firesteel.target.head import decoder, final_norm

_SOFTCAP_KEYS = ("final_logit_softcapping", "final_logit_soft_cap", "output_logit_soft_cap")
# Their config names a cap that the class does not apply.
_UNCAPPED = ("Gemma3ForConditionalGeneration",)
# YaRN keys that correct the softmax of multi-head latent attention; a drafter has plain heads, and servers ignore them there.
_FOREIGN_ROPE = ("mscale", "mscale_all_dim")
_LATENT_KV_HEADS = 16
_PRIVATE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "_attn_implementation_autoset")


@dataclass(frozen=True)
class TargetSpec:
    """Plain facts of a target.

    `vocab_size` counts the rows of the LM head (padding included). Logits are
    `softcap * tanh(scale * (norm(last) W^T) / softcap)`, without the outer part where `softcap` is None.
    `fingerprint` names the weights: two targets with the same fingerprint give the same hidden states.

    The sizes are those that a drafter takes over; it is dense, with grouped key heads, whatever the target is:

    - `intermediate_size`: of the target's dense MLP; where it has experts only, the width that one token uses, at most 4 d.
    - `num_kv_heads`, `head_dim`: multi-head latent attention has no groups of key heads, so that many groups are made as heads and 16
      have in common (key heads are then few and divide among devices); a head is as wide as the target's rotary part.
    - Where layers differ (Gemma 4) the first one counts, which has the narrower heads.
    - `rope_theta`, `rope_scaling`: of the layers with full attention, where layers differ.

    `embed_scale` is what the target multiplies rows of its embedding by. Drafters do not: servers share the bare table with them.
    `norm_offset` is added to a norm's weight before it multiplies (1 in Gemma and Qwen3.5); None where norms are not RMSNorm.
    `layer_types` names the attention of each layer, as in Transformers.
    """

    name: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    hidden_act: str
    softcap: float | None
    logit_scale: float
    eos_ids: tuple[int, ...]
    fingerprint: str
    embed_scale: float = 1.0
    norm_offset: float | None = 0.0
    layer_types: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_spec(model: Any, name: str, eos_ids: tuple[int, ...], mark: str | None = None) -> TargetSpec:
    """Read the facts from a Transformers model; `mark` is its fingerprint where that is not read off its parameters.

    Raises:
        TargetError: the config lacks something a drafter needs.
    """
    config = model.config.get_text_config()
    rope = _rope(config)
    theta = float(rope.pop("rope_theta", getattr(config, "rope_theta", 10000.0)))
    try:
        layer = _layer_config(config)
        heads = int(layer.num_attention_heads)
        latent = getattr(layer, "kv_lora_rank", None) is not None
        return TargetSpec(
            name=name,
            architecture=type(model).__name__,
            model_type=str(config.model_type),
            num_layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            intermediate_size=_mlp_width(layer),
            num_heads=heads,
            num_kv_heads=math.gcd(heads, _LATENT_KV_HEADS) if latent else int(getattr(layer, "num_key_value_heads", None) or heads),
            head_dim=int(layer.qk_rope_head_dim) if latent else int(getattr(layer, "head_dim", None) or config.hidden_size // heads),
            vocab_size=int(model.get_output_embeddings().weight.shape[0]),
            rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
            max_position_embeddings=int(getattr(config, "max_position_embeddings", 4096)),
            hidden_act=str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu")),
            softcap=_softcap(model, config),
            logit_scale=_logit_scale(config),
            eos_ids=eos_ids,
            fingerprint=fingerprint(model) if mark is None else mark,
            embed_scale=_embed_scale(model, config),
            norm_offset=norm_offset(final_norm(model)),
            layer_types=_layer_types(model, config),
        )
    except AttributeError as e:
        raise TargetError(
            f"the config of target {name} lacks what a drafter needs: {e}", mend="the target must be a decoder-only causal language model"
        ) from None


def fingerprint(model: Any, read: Callable[[str], Tensor] | None = None) -> str:
    """Short hash of a model: its config, names and shapes of its parameters and lasting buffers, and values sampled from every one of them.

    Args:
        read: gives a tensor by its name, for a model that is not loaded.
    """
    digest = hashlib.sha256(_config_bytes(model.config))
    for name, parameter in _weights(model):
        flat = (parameter if read is None else read(name)).detach().flatten()
        picks = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).long()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(flat[picks.to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def files_fingerprint(config: Any, content: str) -> str:
    """Short hash of a model whose parameters are in no file: its config as read, and what names the content of its files."""
    digest = hashlib.sha256(_config_bytes(config))
    digest.update(f"files {content}".encode())
    return digest.hexdigest()[:16]


def weight_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of all that a fingerprint samples, by name."""
    return {name: tuple(weight.shape) for name, weight in _weights(model)}


def weights_checksum(model: nn.Module) -> str:
    """Hash over every bit of the weights; equal before and after training, or the target was not frozen."""
    digest = hashlib.sha256()
    for _, parameter in _weights(model):
        digest.update(_bytes(parameter.detach()))
    return digest.hexdigest()


@torch.no_grad()
def norm_offset(norm: nn.Module) -> float | None:
    """What a norm adds to its weight: 0, or 1 as in Gemma; None where it is not an RMSNorm with a weight. Measured, since no config says it."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.ndim != 1 or not weight.is_floating_point():
        return None
    # A mean far from 0 tells RMSNorm from LayerNorm; values so large that no epsilon counts.
    x = 100 * (1 + torch.rand(weight.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float32)).to(weight.device, weight.dtype)
    direction = x.float() / x.float().square().mean().sqrt()
    found = norm(x).float() / direction - weight.float()
    return next((offset for offset in (0.0, 1.0) if float((found - offset).abs().mean()) < 0.05), None)


def default_layer_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly spaced layers from the second to the second-last, as DFlash and DSpark pick them (ids as in `hidden_states`)."""
    first, last = min(2, num_layers), max(num_layers - 2, min(2, num_layers))
    if count == 1 or first == last:
        return (last,)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


def check_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Refuse layers that the target does not have.

    Raises:
        RecipeError: an id out of range, repeated or out of order.
    """
    bad = [i for i in layer_ids if not 0 <= i <= num_layers]
    if bad:
        raise RecipeError(
            f"target.layer_ids has {bad[0]}, but the target has {num_layers} layers",
            mend=f"ids go from 0 (embeddings) to {num_layers} (after the last layer); `auto` gives {list(default_layer_ids(num_layers))}",
        )
    if list(layer_ids) != sorted(set(layer_ids)):
        raise RecipeError(f"target.layer_ids={list(layer_ids)} must be ascending without repetition")


def _layer_config(config: Any) -> Any:
    """The config of one layer: the config itself, but for targets whose layers have different sizes."""
    return config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config


def _mlp_width(config: Any) -> int:
    own, hidden = getattr(config, "intermediate_size", None), int(config.hidden_size)
    active = next((int(n) for k in ("num_experts_per_tok", "top_k_experts") if (n := getattr(config, k, None))), None)
    expert = getattr(config, "moe_intermediate_size", None)
    if active is None or (own and expert):
        return int(own or 4 * hidden)
    width = int(expert or own or 0)
    return max(width, min(active * width + int(getattr(config, "shared_expert_intermediate_size", None) or 0), 4 * hidden))


def _rope(config: Any) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kinds = {k: v for k, v in rope.items() if isinstance(v, dict)}
    if kinds:
        rope = dict(kinds.get("full_attention") or next(iter(kinds.values())))
    return {k: v for k, v in rope.items() if k not in _FOREIGN_ROPE}


def _layer_types(model: Any, config: Any) -> tuple[str, ...]:
    given = getattr(config, "layer_types", None)
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return tuple(given) if given else (kind,) * len(decoder(model).layers)


def _softcap(model: Any, config: Any) -> float | None:
    if type(model).__name__ in _UNCAPPED:
        return None
    return next((float(v) for k in _SOFTCAP_KEYS if (v := getattr(config, k, None))), None)


def _embed_scale(model: Any, config: Any) -> float:
    """Gemma scales inside its embedding module, Granite after it."""
    own = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    return float(own) * float(getattr(config, "embedding_multiplier", None) or 1.0)


def _logit_scale(config: Any) -> float:
    """Cohere multiplies logits by `logit_scale`; Granite divides them by `logits_scaling`."""
    if (scale := getattr(config, "logit_scale", None)) is not None:
        return float(scale)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(scaling)
    return 1.0


def _config_bytes(config: Any) -> bytes:
    """A config without what differs between two loads of the same model."""
    kept = {k: v for k, v in config.get_text_config().to_dict().items() if k not in _PRIVATE_KEYS}
    return json.dumps(kept, sort_keys=True, default=str).encode()


def _weights(model: Any) -> list[tuple[str, Tensor]]:
    """Parameters and the buffers that are saved with them (a router's bias, a layer's scale), by name; tied ones once."""
    saved = set(model.state_dict())
    return sorted([*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in saved)], key=lambda pair: pair[0])


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
