"""Verb `convert` with a real target, and training that goes on from what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from line_screen import QuietScreen
from typer.testing import CliRunner

from firesteel.cli.app import app
from firesteel.cli.runner import LINE
from firesteel.drafters.build import make_config
from firesteel.drafters.registry import get_spec
from firesteel.errors import CheckpointError, FiresteelError, RecipeError
from firesteel.package.contract import make_contract
from firesteel.package.export import export
from firesteel.package.load import load
from firesteel.recipe import Drafter
from firesteel.stages import configure, train
from firesteel.stages.convert import convert_once
from firesteel.stages.line import Line
from firesteel.stages.warm import warm_source

MakeLine = Callable[..., Line]
LAYERS = (1, 2, 3)


@pytest.fixture
def dflash(make_line: MakeLine, tmp_path: Path) -> Path:
    """A DFlash drafter of the tiny target, untrained."""
    spec = make_line().target.spec
    config = make_config(Drafter(algorithm="dflash", block_size=4, num_layers=1), configure.target_facts(spec), LAYERS, 3)
    torch.manual_seed(1)
    contract = make_contract(config, spec, template_options={}, temperatures=(), promise=None, speculative_tokens=3)
    export(tmp_path / "dflash", get_spec("dflash").build(config).state_dict(), config, contract, target_ids=None, head_rows=None, dtype=torch.float32)
    return tmp_path / "dflash"


def test_out_and_in_with_the_target(make_line: MakeLine, dflash: Path, tmp_path: Path) -> None:
    line, screen = make_line(), QuietScreen()
    convert_once(line, screen, dflash, tmp_path / "sglang", "sglang", [])
    convert_once(line, screen, tmp_path / "sglang", tmp_path / "back", "speculators", [])
    first, second = load(dflash), load(tmp_path / "back")
    # Of heads that are not there nothing is said, and nothing comes back.
    assert replace(second.config, confidence_with_markov=first.config.confidence_with_markov) == first.config
    assert second.contract == first.contract
    assert all(torch.equal(second.tensors[n], t) for n, t in first.tensors.items())
    assert any("captured states [1, 2, 3], 3 drafts a round, after the anchor" in text for text in screen.lines)


def test_the_verb(dflash: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(dflash), str(tmp_path / "out"), "--to", "sglang"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "config.json").is_file()
    wrong = CliRunner().invoke(app, ["convert", str(dflash), str(tmp_path / "other"), "layer_id=3"])
    assert isinstance(wrong.exception, FiresteelError)
    assert "did you mean layer_ids=" in str(wrong.exception)


def test_dspark_goes_on_from_dflash(make_line: MakeLine, dflash: Path) -> None:
    """One step with hardly any learning rate: the weights are still the DFlash's, the heads are new."""
    settings = {
        "drafter": {"block_size": 4, "num_layers": 1, "markov_rank": 8, "sample_from_anchor": False, "init": str(dflash)},
        "target": {"layer_ids": list(LAYERS)},
        "train": {"max_steps": 1, "validate_every": 1, "lr": 1e-9, "warmup": 0.0},
    }
    line = make_line(**settings)
    for _, stage in LINE[:4]:
        stage(line)
    trained, source = train.load_trained(line, "dspark"), load(dflash)
    assert trained.config.mask_token_id == source.config.mask_token_id
    state = trained.drafter.state_dict()
    for name, tensor in source.tensors.items():
        assert torch.allclose(state[name], tensor, atol=1e-6), name
    assert any("14 tensors from" in text and "fresh: confidence_head" in text for text in line.screen.lines)  # type: ignore[attr-defined]

    contradicting = make_line(**{**settings, "drafter": {**settings["drafter"], "sample_from_anchor": True}})
    with pytest.raises(RecipeError, match="sample_from_anchor is False there, True"):
        train.run(contradicting)


def test_what_is_no_checkpoint_is_refused(dflash: Path, tmp_path: Path) -> None:
    assert warm_source(Drafter(init="target")) is None
    with pytest.raises(RecipeError, match="init=taget is no folder"):
        warm_source(Drafter(init="taget"))
    convert_once(None, QuietScreen(), dflash, tmp_path / "sglang", "sglang", [])
    with pytest.raises(CheckpointError, match="of another layout"):
        warm_source(Drafter(init=str(tmp_path / "sglang")))
