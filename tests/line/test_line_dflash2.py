"""DFlash2 down the whole line, beside the drafters that it extends; and what a recipe that compares with an unknown one is told."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from firesteel.cli.runner import run_line
from firesteel.errors import RecipeError
from firesteel.evaluation.report import read_report
from firesteel.stages import check
from firesteel.stages.configure import algorithms
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]

SMALL = {"group": 8, "rank": 8, "top_k": 6}


def test_dflash2_walks_the_line_and_is_proven(make_line: MakeLine) -> None:
    line = make_line(
        drafter={"algorithm": "dflash2", "dflash2": SMALL},
        train={"optimizer": "muon", "max_steps": 40, "validate_every": 20},
        evaluate={"compare": ["dflash", "dspark", "dflash2"], "temperatures": [0.0, 1.0]},
    )
    run_line(line)
    report = read_report(line.folder / "report.json")
    assert set(report["drafters"]) == {"dflash2", "dflash", "dspark"}
    assert {row["temperature"] for row in report["temperatures"]} == {0.0, 1.0}
    proof = json.loads((line.folder / "package" / "manifest.json").read_text())["about"]["proof"]
    # Validation replays the selector's choices slot by slot, decoding walks through them: the same rounds.
    assert proof["decoded"] == pytest.approx(proof["promised"], abs=1e-9)
    card = (line.folder / "package" / "README.md").read_text()
    assert "# DFlash2 drafter" in card
    assert '"method": "dflash"' in card
    assert "V2 model runner" in card


@pytest.mark.parametrize("use", [algorithms, check.run])
def test_an_unknown_algorithm_to_compare_with_is_refused_before_training(make_line: MakeLine, use: Callable[[Line], object]) -> None:
    with pytest.raises(RecipeError, match=r"evaluate\.compare=dflsh is not known"):
        use(make_line(evaluate={"compare": ["dflsh"]}))
