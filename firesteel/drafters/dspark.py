"""DSpark's two backbones behind one name: grouped queries (`BlockDrafter`) and latent attention (`LatentDrafter`), told apart by the config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.drafters import block_format as blocks
from firesteel.drafters import latent_format as latents
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.keys import Key
from firesteel.drafters.latent import LatentDrafter
from firesteel.drafters.latent_session import LatentSession
from firesteel.drafters.rows import DraftSession
from firesteel.drafters.session import BlockSession
from firesteel.kernels.packed import PackedLinear


def build(config: DraftConfig) -> nn.Module:
    """The trainable module of a config."""
    return LatentDrafter(config) if latents.is_latent(config) else BlockDrafter(config)


def open_session(
    drafter: BlockDrafter | LatentDrafter,
    embed: Tensor,
    head: Tensor | PackedLinear,
    *,
    draft_to_target: Tensor | None,
    max_length: int,
    confidence_temperatures: Sequence[float] | None = None,
) -> DraftSession:
    """The decoding session of a module; arguments are those of `BlockSession`."""
    opened = LatentSession if isinstance(drafter, LatentDrafter) else BlockSession
    return opened(drafter, embed, head, draft_to_target=draft_to_target, max_length=max_length, confidence_temperatures=confidence_temperatures)  # type: ignore[arg-type]


def keys(config: DraftConfig) -> dict[str, Key]:
    """The trained tensors of a config."""
    return latents.latent_keys(config) if latents.is_latent(config) else blocks.block_keys(config)


def options(settings: recipes.Drafter) -> dict[str, Any]:
    """`extra` of a config."""
    return latents.latent_options(settings) if settings.backbone == "mla" else {}


def check(config: DraftConfig) -> None:
    """Refuse what the backbone or the heads do not have.

    Raises:
        CheckpointError: names it.
    """
    blocks.check_heads(config)
    if latents.is_latent(config):
        latents.check_latent(config)


def unserved(config: DraftConfig) -> str | None:
    """Why vLLM cannot serve a drafter, or None."""
    return None if latents.is_latent(config) else blocks.block_unserved(config)


def limits(config: DraftConfig) -> list[str]:
    """What engines do not serve of a drafter."""
    return latents.latent_limits() if latents.is_latent(config) else blocks.block_limits(config)
