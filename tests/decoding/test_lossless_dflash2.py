"""Proof by enumeration that DFlash2's own walk keeps the target's distribution: its draws, too, are run through every outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from decoding_toys import Enumerated, ToyStep, ToyTarget, all_outcomes, distance, random_table, texts
from torch import Tensor

from firesteel.decoding.decode import decode_speculative
from firesteel.drafters import dflash2_session
from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.dflash2 import DFlash2Drafter
from firesteel.drafters.dflash2_session import DFlash2Session
from firesteel.drafters.rows import Draft

PROMPT, VOCAB, LENGTH = (0, 1), 3, 5
CONFIG = DraftConfig(
    algorithm="dflash2",
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    target_hidden_size=8,
    layer_ids=(1,),
    block_size=3,
    mask_token_id=2,
    sample_from_anchor=False,
    layer_types=(FULL,),
    extra={"kernel": 2, "group": 4, "rank": 3, "top_k": 2},
)


class SpeakingTarget(ToyTarget):
    """Its captured state of a position is a vector that belongs to the token."""

    def forward(self, tokens: Sequence[int] | Tensor, *, keep: int | None = None) -> ToyStep:
        step = super().forward(tokens, keep=keep)
        states = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        return ToyStep(step.logits, states[step.aux[:, 0].long()])


@dataclass
class Listed:
    """Draws that are made when they are looked up."""

    probs: Tensor
    chance: Enumerated

    def __iter__(self) -> Iterator[Listed]:
        return (Listed(slot, self.chance) for slot in self.probs)

    def __getitem__(self, row: int) -> int:
        return self.chance.pick(self.probs[row])


class Liar(DFlash2Session):
    """Says that it drew from all logits, like a DFlash."""

    def draft(self, anchor: int, count: int, *, temperature: float = 0.0, generator: torch.Generator | None = None) -> Draft:
        draft = super().draft(anchor, count, temperature=temperature, generator=generator)
        z = self.states(anchor)[1 : 1 + count]
        return replace(draft, probs=(self._picker.head(z) / temperature).softmax(-1))  # type: ignore[attr-defined]


def written(monkeypatch: pytest.MonkeyPatch, kind: type[DFlash2Session], seed: int, temperature: float = 1.0) -> tuple[float, int]:
    """Distance between the distribution of decoded texts and the target's own, and how many ways there were."""
    torch.manual_seed(seed)
    drafter = DFlash2Drafter(CONFIG).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.7)
    tables = torch.randn(2, VOCAB, 8, dtype=torch.float64)
    session = kind(drafter.eval(), tables[0], tables[1], draft_to_target=None, max_length=16)
    target, ways = random_table(VOCAB, seed), []

    def program(chance: Enumerated) -> tuple[int, ...]:
        monkeypatch.setattr(dflash2_session, "draw", lambda probs, generator: Listed(probs, chance))
        ways.append(1)
        done = decode_speculative(
            SpeakingTarget(target), session, PROMPT, draft_tokens=2, max_new_tokens=LENGTH, eos_ids={1}, temperature=temperature, chance=chance
        )
        return tuple(done.tokens)

    found = all_outcomes(program)
    sharpened = lambda context: (target(context).log() / temperature).softmax(-1)  # noqa: E731
    return distance(found, texts(sharpened, PROMPT, LENGTH, {1})), len(ways)


@pytest.mark.lossless
@pytest.mark.parametrize(("seed", "temperature"), [(0, 1.0), (1, 0.6)])
def test_texts_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch, seed: int, temperature: float) -> None:
    off, ways = written(monkeypatch, DFlash2Session, seed, temperature)
    assert off < 1e-9
    assert ways > 200


@pytest.mark.lossless
def test_a_distribution_that_was_not_drawn_from_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    off, _ = written(monkeypatch, Liar, 0)
    assert off > 1e-3
