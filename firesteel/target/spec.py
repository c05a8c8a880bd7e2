"""TargetSpec: what must be known of a frozen target, read from its config and weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firesteel.errors import RecipeError, TargetError

_SOFTCAP_KEYS = ("final_logit_softcapping", "final_logit_soft_cap", "output_logit_soft_cap")
_PRIVATE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "_attn_implementation_autoset")


@dataclass(frozen=True)
class TargetSpec:
    """Plain facts of a target.

    `vocab_size` counts the rows of the LM head (padding included). Logits are
    `softcap * tanh(scale * (norm(last) W^T) / softcap)`, without the outer part where `softcap` is None.
    `fingerprint` names the weights: two targets with the same fingerprint give the same hidden states.
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_spec(model: Any, name: str, eos_ids: tuple[int, ...]) -> TargetSpec:
    """Read the facts from a loaded Transformers model.

    Raises:
        TargetError: the config lacks something a drafter needs.
    """
    config = model.config.get_text_config()
    rope = dict(getattr(config, "rope_parameters", None) or {})
    theta = float(rope.pop("rope_theta", getattr(config, "rope_theta", 10000.0)))
    scaling = rope if rope.get("rope_type", "default") != "default" else None
    try:
        heads = int(config.num_attention_heads)
        return TargetSpec(
            name=name,
            architecture=type(model).__name__,
            model_type=str(config.model_type),
            num_layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
            num_heads=heads,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            vocab_size=int(model.get_output_embeddings().weight.shape[0]),
            rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=int(getattr(config, "max_position_embeddings", 4096)),
            hidden_act=str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu")),
            softcap=next((float(v) for k in _SOFTCAP_KEYS if (v := getattr(config, k, None))), None),
            logit_scale=_logit_scale(config),
            eos_ids=eos_ids,
            fingerprint=fingerprint(model),
        )
    except AttributeError as e:
        raise TargetError(
            f"the config of target {name} lacks what a drafter needs: {e}", mend="the target must be a decoder-only causal language model"
        ) from None


def fingerprint(model: Any) -> str:
    """Short hash of a model: its config, its parameters' names and shapes, and bytes sampled from every one of them."""
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.get_text_config().to_dict().items() if k not in _PRIVATE_KEYS}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        picks = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).long()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(flat[picks.to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def weights_checksum(model: nn.Module) -> str:
    """Hash over every bit of the weights; equal before and after training, or the target was not frozen."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(_bytes(parameter.detach()))
    return digest.hexdigest()


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


def _logit_scale(config: Any) -> float:
    """Cohere multiplies logits by `logit_scale`; Granite divides them by `logits_scaling`."""
    if (scale := getattr(config, "logit_scale", None)) is not None:
        return float(scale)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(scaling)
    return 1.0


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
