"""Rounded products may write training answers; what validation promises is always said by the whole target."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from firesteel.stages import prompts, respond
from firesteel.stages.line import Line


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies no bfloat16 here")
def test_validation_is_answered_by_the_whole_target(make_line: Callable[..., Line]) -> None:
    line = make_line(responses={"precision": "bfloat16"})
    prompts.run(line)
    found = respond.run(line)
    assert all(a.half for a in respond.read_responses(found, "train"))
    validation = respond.read_responses(found, "validation")
    assert validation
    assert not any(a.half for a in validation)

    whole = make_line(responses={"precision": "float32", "answers": str(found / "train.jsonl")})
    prompts.run(whole)
    again = respond.run(whole)
    assert not any(a.half for a in respond.read_responses(again, "train")), "answers on file that were rounded do not serve here"
    assert respond.read_responses(again, "validation") == validation
