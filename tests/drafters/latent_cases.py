"""Small drafters with latent attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from block_cases import TINY as PLAIN

from firesteel.drafters.config import DraftConfig
from firesteel.drafters.latent import LatentDrafter

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
TINY = replace(
    PLAIN,
    num_heads=3,
    num_kv_heads=3,
    head_dim=4,
    max_position_embeddings=64,
    extra={"backbone": "mla", "q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "v_head_dim": 5},
)
VARIANTS = {
    "plain": TINY,
    "yarn": replace(TINY, rope_scaling=YARN),
    "yarn-without-mscale": replace(TINY, rope_scaling={k: v for k, v in YARN.items() if "mscale" not in k}),
    "wide-values": replace(TINY, extra={**TINY.extra, "v_head_dim": 10}),
    "blind-confidence": replace(TINY, confidence_with_markov=False),
    "no-confidence": replace(TINY, confidence_head=False),
}
LENGTHS, ANCHORS = [9, 7], [0, 3, 8, 9, 12]


def make_drafter(config: DraftConfig, seed: int = 0) -> LatentDrafter:
    """Every parameter random and of a size that matters; float64."""
    torch.manual_seed(seed)
    drafter = LatentDrafter(config).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=max(parameter.shape[1] ** -0.5, 0.2))
    return drafter
