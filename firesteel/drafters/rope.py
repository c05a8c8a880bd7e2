"""Rotary positions (Su et al. 2021, half-rotation as in Llama and Qwen), with the frequency rules of Transformers.

What a server applies is what Transformers computes from the exported config, so the scaled kinds come from there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from firesteel.drafters.config import DraftConfig
from firesteel.errors import RecipeError

# Kinds whose frequencies do not depend on the length of the sequence.
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def rope_kind(scaling: dict[str, object] | None) -> str:
    """The `rope_type` of a config's `rope_scaling`; `default` where there is none."""
    return "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))


class Rope:
    """Frequencies of one drafter.

    Attributes:
        inverse: `[D/2]` float32, radians per position.
        scale: factor on cosine and sine (YaRN's attention factor; 1 otherwise).

    Raises:
        RecipeError: a kind of RoPE that drafters do not have, or a head of odd width.
    """

    def __init__(self, config: DraftConfig) -> None:
        if config.head_dim % 2:
            raise RecipeError(f"drafter.head_dim={config.head_dim} is odd, but RoPE turns pairs", mend="set drafter.head_dim to an even number")
        kind = rope_kind(config.rope_scaling)
        if kind not in ROPE_KINDS:
            raise RecipeError(f"a drafter cannot have RoPE of kind {kind!r}", mend=f"known kinds: {', '.join(ROPE_KINDS)}")
        self.scale = 1.0
        if kind == "default":
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            self.inverse = 1.0 / config.rope_theta**exponents
        else:
            with torch.device("cpu"):  # also while a module is built on the meta device: these rules look at values
                self.inverse, self.scale = ROPE_INIT_FUNCTIONS[kind](_as_transformers(config, kind), torch.device("cpu"))

    def table(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each `[..., 1, D/2]` (1 for the heads), of positions `[...]`. Angles are float32 whatever `dtype` is."""
        angles = (positions.float()[..., None] * self.inverse.to(positions.device)).unsqueeze(-2)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn `x [..., heads, D]` by a table of `[..., 1, D/2]`: pair i is (x_i, x_{i + D/2})."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _as_transformers(config: DraftConfig, kind: str) -> Qwen3Config:
    rest = {k: v for k, v in (config.rope_scaling or {}).items() if k not in ("type", "rope_type", "rope_theta")}
    return Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": kind, "rope_theta": config.rope_theta, **rest},
    )
