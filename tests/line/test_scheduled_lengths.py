"""Scheduled draft lengths on a line: measured once, kept, and the same text."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from line_screen import QuietScreen

from firesteel.decoding.decode import decode_plain, decode_speculative
from firesteel.recipe import recipe_from_dict
from firesteel.stages.runtime import Proposal
from firesteel.stages.schedule import make_scheduler, rate_of_length, step_profile


@dataclass
class Counting:
    """A target that counts up to 49 and starts again."""

    tokens: list[int] = field(default_factory=list)
    max_length: int = 512
    engine_name: str = "toy"

    @property
    def length(self) -> int:
        return len(self.tokens)

    def forward(self, tokens, *, keep=None):
        self.tokens += list(tokens)
        rows = torch.nn.functional.one_hot((torch.as_tensor(list(tokens)) + 1) % 50, 50).float()
        return SimpleNamespace(logits=rows[-(keep or len(rows)) :], aux=torch.zeros(len(rows), 1))

    def rewind(self, length: int) -> None:
        del self.tokens[length:]


class Guessing:
    """Knows how to count, but not that it starts again."""

    def observe(self, tokens, aux) -> None: ...

    def rewind(self, length: int) -> None: ...

    def draft(self, anchor: int, count: int, *, temperature=0.0, generator=None) -> Proposal:
        return Proposal([anchor + 1 + k for k in range(count)], None, None)


@dataclass
class Config:
    algorithm: str = "dspark"


def world(tmp_path):
    recipe = recipe_from_dict({"target": {"model": "x", "cache_dir": str(tmp_path)}, "train": {"max_steps": 1}})
    target = SimpleNamespace(spec=SimpleNamespace(fingerprint="abc"), device=torch.device("cpu"))
    line = SimpleNamespace(recipe=recipe, target=target, screen=QuietScreen())
    return line, SimpleNamespace(target=Counting(), session=Guessing(), config=Config(), contract=None, num_drafts=4)


def test_a_profile_is_kept_and_serves_prompts_of_like_length(tmp_path):
    line, runtime = world(tmp_path)
    first = step_profile(line, runtime, [1] * 20)
    assert step_profile(line, runtime, [2] * 30) == first
    assert len(list((tmp_path / "profiles").iterdir())) == 1
    step_profile(line, runtime, [1] * 40)
    runtime.target.engine_name = "other"
    step_profile(line, runtime, [1] * 40)
    assert len(list((tmp_path / "profiles").iterdir())) == 3
    assert first.step.sizes == (1, 2, 3, 4, 5)
    assert first.draft is not None


def test_the_text_is_the_targets(tmp_path):
    line, runtime = world(tmp_path)
    policy = make_scheduler(line, runtime, [7])
    options = {"max_new_tokens": 120, "eos_ids": ()}
    plain = decode_plain(Counting(), [7], **options).tokens
    assert decode_speculative(runtime.target, runtime.session, [7], draft_tokens=4, lengths=policy, **options).tokens == plain


@pytest.mark.parametrize(("length", "drafts", "rate"), [(1.0, 4, 0.0), (5.0, 4, 1.0), (1.75, 2, 0.5), (1.6, 1, 0.6)])
def test_rate_of_a_promised_length(length, drafts, rate):
    assert rate_of_length(length, drafts) == pytest.approx(rate, abs=1e-6)
