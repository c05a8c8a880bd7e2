"""Proof by enumeration that the sessions of EAGLE-3 and P-EAGLE keep the target's distribution, with a reduced vocabulary too.

The sessions' own draws are run through every outcome, as well as those of verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding_toys import Enumerated, ToyStep, ToyTarget, all_outcomes, distance, random_table, texts
from torch import Tensor

from firesteel.decoding.decode import decode_speculative
from firesteel.drafters import eagle_session
from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.drafters.rows import Draft
from firesteel.stages.runtime import FullVocabulary

PROMPT, VOCAB, LENGTH, WIDTH = (0, 1), 3, 5, 8
IDS = torch.tensor([0, 2])  # the reduced vocabulary never drafts token 1
EAGLE3 = DraftConfig(
    algorithm="eagle3",
    hidden_size=WIDTH,
    intermediate_size=WIDTH,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    target_hidden_size=WIDTH,
    layer_ids=(1,),
    block_size=2,
    mask_token_id=None,
    sample_from_anchor=True,
    layer_types=(FULL,),
    causal=True,
    extra={"layer_style": "llama", "norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
)
CONFIGS = {
    "eagle3": EAGLE3,
    "eagle3-reduced": replace(EAGLE3, draft_vocab_size=2),
    "peagle-reduced": replace(EAGLE3, algorithm="peagle", draft_vocab_size=2, mask_token_id=2),
}


class SpeakingTarget(ToyTarget):
    """Its captured state of a position is a vector that belongs to the token."""

    def forward(self, tokens: Sequence[int] | Tensor, *, keep: int | None = None) -> ToyStep:
        step = super().forward(tokens, keep=keep)
        states = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        return ToyStep(step.logits, states[step.aux[:, 0].long()])


class Liar(FullVocabulary):
    """Hands over the distributions of draft ids as if they were those of target ids."""

    def draft(self, anchor: int, count: int, **how: Any) -> Any:
        draft: Draft = self.inner.draft(anchor, count, **how)
        assert draft.probs is not None
        spread = torch.nn.functional.pad(draft.probs, (0, VOCAB - draft.probs.shape[1]))
        spread[:, 2] = spread[:, 1]  # nothing is ever drawn that has no probability
        return replace(draft, probs=spread)


def written(monkeypatch: pytest.MonkeyPatch, name: str, kind: type[FullVocabulary], temperature: float) -> tuple[float, int]:
    """Distance between the distribution of decoded texts and the target's own, and how many ways there were."""
    config, seed, ways = CONFIGS[name], 3, []
    torch.manual_seed(seed)
    drafter: Any = get_spec(config.algorithm).build(config).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.7)
    embed, head = torch.randn(2, VOCAB, WIDTH, dtype=torch.float64)
    ids = IDS if config.reduced_vocab else None
    session = kind(get_spec(config.algorithm).session(drafter.eval(), embed, head if ids is None else head[ids], draft_to_target=ids, max_length=16))
    target = random_table(VOCAB, seed)

    def program(chance: Enumerated) -> tuple[int, ...]:
        monkeypatch.setattr(eagle_session, "draw", lambda probs, generator: chance.pick(probs))
        ways.append(1)
        done = decode_speculative(
            SpeakingTarget(target), session, PROMPT, draft_tokens=2, max_new_tokens=LENGTH, eos_ids={1}, temperature=temperature, chance=chance
        )
        return tuple(done.tokens)

    found = all_outcomes(program)
    sharpened = lambda context: (target(context).log() / temperature).softmax(-1)  # noqa: E731
    return distance(found, texts(sharpened, PROMPT, LENGTH, {1})), len(ways)


@pytest.mark.lossless
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", CONFIGS)
def test_texts_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch, name: str, temperature: float) -> None:
    off, ways = written(monkeypatch, name, FullVocabulary, temperature)
    assert off < 1e-9
    assert ways > 150


@pytest.mark.lossless
def test_draft_ids_taken_for_target_ids_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    off, _ = written(monkeypatch, "eagle3-reduced", Liar, 1.0)
    assert off > 1e-3
