"""Tiny drafters of every kind, with random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.package.contract import CalibrationRow, CalibrationTable, Contract, Promise, make_contract
from firesteel.package.export import Exported, export
from firesteel.package.keys import drafter_keys
from firesteel.target.spec import TargetSpec

TARGET = TargetSpec(
    name="acme/tiny-chat",
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=6,
    hidden_size=24,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=40,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    rope_scaling=None,
    max_position_embeddings=512,
    hidden_act="silu",
    softcap=30.0,
    logit_scale=0.5,
    eos_ids=(1,),
    fingerprint="0123456789abcdef",
)

DSPARK = DraftConfig(
    algorithm="dspark",
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=40,
    draft_vocab_size=40,
    target_hidden_size=24,
    layer_ids=(1, 3, 6),
    block_size=4,
    mask_token_id=39,
    sample_from_anchor=True,
    layer_types=(FULL, FULL),
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    max_position_embeddings=512,
    markov_rank=6,
    confidence_head=True,
)
DFLASH = replace(DSPARK, algorithm="dflash", markov_rank=0, confidence_head=False, sample_from_anchor=False)

EAGLE3 = replace(
    DFLASH,
    algorithm="eagle3",
    num_layers=1,
    layer_types=(FULL,),
    sample_from_anchor=True,
    causal=True,
    mask_token_id=None,
    extra={"layer_style": "llama", "norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
)
PEAGLE = replace(EAGLE3, algorithm="peagle", mask_token_id=39, extra={**EAGLE3.extra, "norm_before_residual": False, "drop_ratio": 0.7, "drop_floor": 0.2})

CONFIGS = {
    "vanilla": DSPARK,
    "gated": replace(DSPARK, markov_head="gated"),
    "rnn": replace(DSPARK, markov_head="rnn", confidence_with_markov=False),
    "no-markov": replace(DSPARK, markov_rank=0),
    "no-confidence": replace(DSPARK, confidence_head=False),
    "fill-in": replace(DSPARK, sample_from_anchor=False),
    "reduced": replace(DSPARK, draft_vocab_size=10),
    "reduced-gated": replace(DSPARK, draft_vocab_size=10, markov_head="gated"),
    "sliding": replace(DSPARK, layer_types=(SLIDING, SLIDING), sliding_window=16),
    "sliding-causal": replace(DSPARK, layer_types=(SLIDING, SLIDING), sliding_window=16, causal=True),
    "mixed": replace(DSPARK, layer_types=(SLIDING, FULL), sliding_window=16),
    "full-causal": replace(DSPARK, causal=True),
    "scaled-rope": replace(DSPARK, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "dflash": DFLASH,
    "dflash-reduced": replace(DFLASH, draft_vocab_size=10),
    "dflash-sliding": replace(DFLASH, layer_types=(SLIDING, SLIDING), sliding_window=16),
    "eagle3": EAGLE3,
    "eagle3-qwen3": replace(EAGLE3, draft_vocab_size=10, extra={**EAGLE3.extra, "layer_style": "qwen3", "fc_norm": True, "norm_output": True}),
    "eagle3-sliding": replace(
        EAGLE3, num_layers=2, layer_types=(SLIDING, SLIDING), sliding_window=16, extra={**EAGLE3.extra, "norm_before_residual": False, "norm_before_fc": True}
    ),
    "peagle": PEAGLE,
    "peagle-two": replace(PEAGLE, num_layers=2, layer_types=(FULL, FULL), draft_vocab_size=10),
}
BLOCKS = [name for name, config in CONFIGS.items() if config.algorithm in ("dspark", "dflash")]
EAGLES = [name for name, config in CONFIGS.items() if config.algorithm in ("eagle3", "peagle")]


def make_state(config: DraftConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 parameters by checkpoint key."""
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(key.shape, generator=rng) for name, key in drafter_keys(config).items()}


def make_vocab(config: DraftConfig, seed: int = 1) -> tuple[Tensor | None, Tensor | None]:
    """Target ids and LM head rows, or neither."""
    if not config.reduced_vocab:
        return None, None
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randperm(config.vocab_size, generator=rng)[: config.draft_vocab_size].sort().values
    return ids, torch.randn(config.draft_vocab_size, config.hidden_size, generator=rng)


def toy_calibration(config: DraftConfig) -> CalibrationTable:
    rows = [
        CalibrationRow(position=k, rounds=50, ece_before=0.1 + k / 100, ece_after=0.01 + k / 1000, auc_before=0.7, auc_after=None if k == 4 else 0.75)
        for k in range(1, config.num_drafts + 1)
    ]
    return CalibrationTable(bins=15, measured_on="5 validation documents", positions=tuple(rows))


def toy_contract(config: DraftConfig, **changes: Any) -> Contract:
    contract = make_contract(
        config,
        TARGET,
        template_options={"enable_thinking": False},
        temperatures=tuple(1.0 + 0.1 * k for k in range(config.num_drafts)) if config.confidence_head else (),
        promise=Promise(acceptance_length=2.5, rounds=100, accepted=150, draft_length=config.num_drafts, temperature=0.0, measured_on="validation"),
        speculative_tokens=config.num_drafts,
        calibration=toy_calibration(config) if config.confidence_head else None,
    )
    return contract.model_copy(update=changes)


def toy_export(folder: Path, config: DraftConfig, dtype: torch.dtype = torch.float32, **changes: Any) -> Exported:
    ids, rows = make_vocab(config)
    return export(folder, make_state(config), config, toy_contract(config, **changes), target_ids=ids, head_rows=rows, dtype=dtype)


def edit(path: Path, change: dict[str, Any], *, drop: tuple[str, ...] = ()) -> None:
    """Set (dotted keys) or drop values of a JSON file."""
    data = json.loads(path.read_text())
    for key, value in change.items():
        *parents, last = key.split(".")
        here = data
        for parent in parents:
            here = here[int(parent)] if isinstance(here, list) else here[parent]
        here[last] = value
    for key in drop:
        *parents, last = key.split(".")
        here = data
        for parent in parents:
            here = here[parent]
        del here[last]
    path.write_text(json.dumps(data))
