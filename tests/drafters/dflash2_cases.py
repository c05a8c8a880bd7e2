"""Small DFlash2 drafters for tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from block_cases import DFLASH

from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.drafters.dflash2 import DFlash2Drafter

OWN = {"kernel": 2, "group": 8, "rank": 6, "top_k": 5, "selector_loss": 1.0}
TINY2 = replace(DFLASH, algorithm="dflash2", extra=OWN)
VARIANTS2 = {
    "plain": TINY2,
    "anchor": replace(TINY2, sample_from_anchor=True),
    "mixed-causal": replace(TINY2, layer_types=(SLIDING, FULL), sliding_window=6, causal=True),
    "three-taps": replace(TINY2, extra=OWN | {"kernel": 3, "group": 1, "top_k": 1}),
    "whole-block": replace(TINY2, extra=OWN | {"kernel": 4, "group": 24, "top_k": 50}),
}


def make_drafter2(config: DraftConfig, seed: int = 0, *, dtype: torch.dtype = torch.float32) -> DFlash2Drafter:
    """A drafter in which every parameter is random and of a size that matters."""
    torch.manual_seed(seed)
    drafter = DFlash2Drafter(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim < 2 or "conv" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=1.0 if "codebook" in name else 0.25)
    return drafter.to(dtype)
