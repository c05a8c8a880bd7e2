"""Training leaves the target as it is, bit for bit; if it does not, nothing is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from firesteel.cli.runner import LINE
from firesteel.errors import TrainingError
from firesteel.stages import train as train_stage
from firesteel.stages.line import Line


def test_training_leaves_the_target_bit_for_bit(make_line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line(drafter={"init": "target", "draft_vocab_size": 40, "block_size": 4, "num_layers": 1, "markov_rank": 8}, train={"max_steps": 3})
    for _, stage in LINE[:3]:
        stage(line)
    before = {name: p.detach().clone() for name, p in line.target.model.named_parameters()}
    real = train_stage.train

    def touching(job: Any) -> Any:
        found = real(job)
        with torch.no_grad():  # the smallest change there can be: the last bit of one weight
            weight = line.target.model.model.layers[0].mlp.up_proj.weight
            weight.view(torch.int32)[0, 0] ^= 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(train_stage, "train", touching)
        with pytest.raises(TrainingError, match="the target's weights changed while the drafter was trained"):
            LINE[3][1](line)
    assert not (line.folder / "train").exists()
    with torch.no_grad():
        line.target.model.model.layers[0].mlp.up_proj.weight.view(torch.int32)[0, 0] ^= 1
    LINE[3][1](line)
    assert (line.folder / "train" / "manifest.json").is_file()
    for name, parameter in line.target.model.named_parameters():
        assert parameter.equal(before[name]), name
        assert parameter.grad is None, name
