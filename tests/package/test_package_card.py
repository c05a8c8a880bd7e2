"""The card: its front matter parses, its numbers are those given, and absent ones are said to be absent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from package_toys import CONFIGS, DFLASH, DSPARK, toy_contract

from firesteel.drafters.config import DraftConfig
from firesteel.package.card import ABSENT, limits, model_card, speculative_config
from firesteel.package.export import Exported

NUMBERS: dict[str, Any] = {
    "acceptance_length": 3.456,
    "acceptance_length_interval": [3.21, 3.69],
    "requests": 90,
    "draft_length": 4,
    "temperature": 0.0,
    "acceptance_length_by_domain": {"code": 4.01, "rag": None},
    "speedup": 1.87,
    "speedup_interval": [1.8, 1.95],
    "speedup_draft_length": 3,
    "ece_before": 0.125,
    "ece_after": 0.013,
    "ece_held_out": 0.019,
    "auc_before": 0.7,
    "auc_after": 0.75,
    "auc_held_out": 0.72,
    "ece_held_out_per_position": [0.021, 0.022, 0.023],
    "auc_held_out_per_position": [0.71, 0.72, None],
    "machine": "Slow CPU",
    "cores": 2,
}
TRAINING: dict[str, Any] = {"steps": 1234, "epochs": 2.5, "train_seconds": 600.0, "documents": 77, "tokens": 98765, "best_step": 1200, "coverage": 0.987}
EXPORTED = Exported(Path("somewhere"), 12345, 6_700_000, "00")


def card(config: DraftConfig, numbers: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **changes: Any) -> str:
    return model_card(config, toy_contract(config, **changes), numbers=numbers, training=training, exported=EXPORTED)


def test_front_matter() -> None:
    _, front, body = card(DSPARK).split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["license"] == "apache-2.0"
    assert data["base_model"] == "acme/tiny-chat"
    assert {"speculative-decoding", "dspark"} <= set(data["tags"])
    assert body.lstrip().startswith("# DSpark drafter for acme/tiny-chat")
    assert "12,345 trained parameters in 6.7 MB" in body


def test_numbers_are_the_given_ones() -> None:
    text = card(CONFIGS["reduced"], NUMBERS, TRAINING)
    assert "| 3.46 | 3.21 to 3.69 | 90 prompts, 4 drafts a round, temperature 0 |" in text
    assert "| 1.87x | 1.80 to 1.95 | one prompt at a time, 3 drafts a round |" in text
    assert "| code | 4.01 |" in text
    assert f"| rag | {ABSENT} |" in text
    assert "| 2.50 |" in text
    assert "| Documents | 77 |" in text
    assert "| Tokens | 98,765 |" in text
    assert "| Passes over them | 2.50 |" in text
    assert "| Optimiser steps | 1,234 |" in text
    assert "| Best step, by acceptance length | 1,200 |" in text
    assert "| Training time | 10.0 minutes |" in text
    assert "10 of 40 tokens, 98.7% of the answers' tokens" in text
    assert "Measured on Slow CPU (2 cores)" in text
    assert "soft-cap 30, scale 0.5" in text
    assert "1.00, 1.10, 1.20, 1.30" in text


def test_the_calibration_is_shown_position_by_position() -> None:
    text = card(DSPARK, NUMBERS)
    assert "| 1 | 1.00 | 0.110 | 0.011 | 0.021 | 0.700 | 0.750 | 0.710 |" in text
    assert f"| 3 | 1.20 | 0.130 | 0.013 | 0.023 | 0.700 | 0.750 | {ABSENT} |" in text
    assert f"| 4 | 1.30 | 0.140 | 0.014 | {ABSENT} | 0.700 | {ABSENT} | {ABSENT} |" in text
    assert "| mean | | 0.125 | 0.013 | 0.019 | 0.700 | 0.750 | 0.720 |" in text
    assert "Before and after: on 5 validation documents." in text
    fresh = card(DSPARK)  # as the package stage writes it, before evaluation
    assert f"| 1 | 1.00 | 0.110 | 0.011 | {ABSENT} | 0.700 | 0.750 | {ABSENT} |" in fresh
    older = card(DSPARK, NUMBERS, calibration=None)
    assert f"| 1 | 1.00 | {ABSENT} | {ABSENT} | 0.021 | {ABSENT} | {ABSENT} | 0.710 |" in older
    assert "Calibration of the confidences" not in card(DFLASH, NUMBERS)


@pytest.mark.parametrize("empty", [None, {}, dict.fromkeys(NUMBERS)], ids=["none", "empty", "nulls"])
def test_absent_numbers_are_said_to_be_absent(empty: dict[str, Any] | None) -> None:
    text = card(DFLASH, empty, None if empty is None else dict.fromkeys(TRAINING), promise=None, versions={}, target_softcap=None)
    for row in (
        "Acceptance length, pooled: 1 + accepted / rounds",
        "Acceptance length in validation (the promise)",
        "Speed-up of decoding over the plain target",
    ):
        assert f"| {row} | {ABSENT} | {ABSENT} | {ABSENT} |" in text
    assert f"By domain: {ABSENT}." in text
    for row in ("Documents", "Tokens", "Passes over them", "Optimiser steps", "Training time", "Confidence temperatures", "Software"):
        assert f"| {row} | {ABSENT} |" in text
    assert "None" not in text
    assert "Measured on" not in text


def test_the_command_is_the_documented_one() -> None:
    contract = toy_contract(DSPARK, speculative_tokens=3)
    wanted = {"method": "dspark", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    assert speculative_config(DSPARK, contract, "acme/draft") == wanted | {"model": "acme/draft"}
    command = re.search(r"^vllm serve (\S+) --speculative-config '(.*)'$", card(DSPARK, speculative_tokens=3), re.MULTILINE)
    assert command is not None
    assert command[1] == "acme/tiny-chat"
    assert json.loads(command[2]) == wanted | {"model": "PATH_OF_THIS_FOLDER"}
    assert "vllm serve PATH_OF_THE_TARGET" in card(DSPARK, target_name="pypi:weights")


def test_limits_fit_the_drafter() -> None:
    def text(name: str) -> str:
        return " ".join(limits(CONFIGS[name], toy_contract(CONFIGS[name])))

    assert "vanilla" not in text("vanilla")
    assert "`gated`" in text("gated")
    assert "V2 model runner" in text("mixed")
    assert "V2 model runner" not in text("sliding")
    assert "10 of 40 tokens" in text("reduced")
    assert "licence" not in text("vanilla")
    assert "not calibrated" in " ".join(limits(DSPARK, toy_contract(DSPARK, temperatures=())))
