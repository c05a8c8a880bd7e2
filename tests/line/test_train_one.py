"""`firesteel train --only`: the compared drafters of one recipe, trained by processes of their own in one run's folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from firesteel.cli.runner import LINE
from firesteel.errors import RecipeError
from firesteel.stages import train
from firesteel.stages.line import Line
from firesteel.training.checkpoint import BEST


def test_drafters_trained_alone_are_those_of_one_command(make_line: Callable[..., Line]) -> None:
    line = make_line(evaluate={"compare": ["dflash"]})
    for _, stage in LINE[:3]:
        stage(line)
    together = train.run(line)
    weights = [(artifact / BEST).read_bytes() for artifact in together]
    for artifact in together:
        (artifact / "manifest.json").unlink()  # not done, as on a machine that has the states only

    alone = train.run(make_line(evaluate={"compare": ["dflash"]}), "dflash")
    assert [a.path.name for a in alone] == ["train-dflash"]
    assert not (line.folder / "train" / "manifest.json").exists()
    alone = train.run(make_line(evaluate={"compare": ["dflash"]}), "dspark") + alone
    assert [(artifact / BEST).read_bytes() for artifact in alone] == weights

    done = make_line(evaluate={"compare": ["dflash"]})
    train.run(done)
    assert done.screen.lines[-2:] == ["train: up to date", "train-dflash: up to date"]  # type: ignore[attr-defined]


def test_a_drafter_that_the_recipe_does_not_train_is_refused(make_line: Callable[..., Line]) -> None:
    with pytest.raises(RecipeError, match=r"--only=eagle3: the recipe trains dspark, dflash(.|\n)*evaluate\.compare"):
        train.run(make_line(evaluate={"compare": ["dflash"]}), "eagle3")
