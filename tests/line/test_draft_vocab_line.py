"""A drafter whose recipe leaves the size of its vocabulary open: the algorithm's own default, or what the checkpoint has that it starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from firesteel.cli.runner import LINE
from firesteel.drafters.registry import get_spec, register
from firesteel.stages import train
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]
EAGLE = {"algorithm": "eagle3", "block_size": 3, "num_layers": 1}
ONE_STEP = {"max_steps": 1, "validate_every": 1}


@pytest.fixture
def default() -> Iterator[Callable[[int], None]]:
    """Sets EAGLE-3's default; its own is larger than any tiny target."""
    spec = get_spec("eagle3")
    yield lambda size: register(replace(spec, default_draft_vocab=size))
    register(spec)


def test_the_default_is_trained_packaged_and_gone_on_from(make_line: MakeLine, default: Callable[[int], None]) -> None:
    default(40)
    line = make_line(drafter=EAGLE, train=ONE_STEP)
    for _, stage in LINE[:6]:
        stage(line)
    first = train.load_trained(line, "eagle3")
    assert first.config.draft_vocab_size == 40
    assert first.vocab is not None
    assert len(first.vocab) == 40
    assert 0.5 < first.summary["coverage"] <= 1
    assert line.input("train").manifest.settings["drafter"]["draft_vocab_size"] == 40, "an earlier artifact with a whole one is another"

    default(60)  # what it would be if it did not start from the checkpoint
    again = make_line(drafter={**EAGLE, "init": str(line.folder / "package")}, train=ONE_STEP)
    again.recipe.name = "again"
    for _, stage in LINE[:4]:
        stage(again)
    second = train.load_trained(again, "eagle3")
    assert second.vocab is not None
    assert second.vocab.target_ids.equal(first.vocab.target_ids)


def test_the_targets_size_is_its_whole_vocabulary(make_line: MakeLine, default: Callable[[int], None]) -> None:
    default(40)
    line = make_line(drafter={**EAGLE, "draft_vocab_size": 96}, train=ONE_STEP)
    for _, stage in LINE[:4]:
        stage(line)
    trained = train.load_trained(line, "eagle3")
    assert trained.vocab is None
    assert trained.config.draft_vocab_size == trained.config.vocab_size == 96
