"""TargetHead: final norm and LM head, which turn last hidden states into the target's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firesteel.kernels.linear import linear


@dataclass
class TargetHead:
    """The frozen end of a target.

    Attributes:
        norm: the target's final norm module.
        weight: `[V, d]` LM head.
        scale, softcap: logits are `softcap * tanh(scale * x / softcap)`.
        embed: `[V, d]` input embedding table (the same tensor where tied). A target may multiply its rows (`TargetSpec.embed_scale`);
            drafters take them as they are, since servers share the bare table.
    """

    norm: nn.Module
    weight: Tensor
    scale: float
    softcap: float | None
    embed: Tensor

    def states(self, last: Tensor) -> Tensor:
        """Final norm: `[..., d]` last hidden states -> what the LM head multiplies."""
        with torch.no_grad():
            return self.norm(last)

    def logits(self, last: Tensor) -> Tensor:
        """`[..., d]` states before the final norm -> `[..., V]` logits in float32."""
        with torch.no_grad():
            logits = linear(self.states(last.to(self.weight.dtype)), self.weight).float() * self.scale
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def make_head(model: Any, scale: float, softcap: float | None) -> TargetHead:
    """The head of a loaded Transformers model; tensors are shared with it, not copied."""
    return TargetHead(
        norm=final_norm(model),
        weight=model.get_output_embeddings().weight.detach(),
        scale=scale,
        softcap=softcap,
        embed=model.get_input_embeddings().weight.detach(),
    )


def decoder(model: Any) -> Any:
    """The module that holds `layers` and the final norm, also inside a multimodal wrapper."""
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return getattr(inner, "language_model", inner)


def final_norm(model: Any) -> nn.Module:
    """The target's final norm."""
    inner = decoder(model)
    norm = getattr(inner, "norm", None) or getattr(inner, "final_layernorm", None)
    assert isinstance(norm, nn.Module), f"{type(inner).__name__} has no final norm"
    return norm
