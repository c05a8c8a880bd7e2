"""Proof by enumeration that the sessions of EAGLE-3, P-EAGLE, MTP, DSpark and DFlash keep the target's distribution, with a reduced vocabulary too.

The sessions' own draws are run through every outcome, as well as those of verification, under both rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from decoding_toys import Enumerated, ToyStep, ToyTarget, all_outcomes, by_hand, distance, random_table, texts
from torch import Tensor
from transformers import Qwen3Config

from firesteel.decoding.decode import decode_speculative
from firesteel.decoding.policies import StaticThreshold
from firesteel.decoding.sampling import Sampling
from firesteel.decoding.verify import Rejection
from firesteel.drafters import eagle_session
from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.mtp_format import adapt_to_target
from firesteel.drafters.pick import TokenPicker
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
DSPARK = replace(EAGLE3, algorithm="dspark", mask_token_id=2, causal=False, markov_rank=3, confidence_head=True, extra={})
QWEN3: dict[str, Any] = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
).to_dict()
CONFIGS = {
    "eagle3": EAGLE3,
    "eagle3-reduced": replace(EAGLE3, draft_vocab_size=2),
    "peagle-reduced": replace(EAGLE3, algorithm="peagle", draft_vocab_size=2, mask_token_id=2),
    "mtp": adapt_to_target(replace(EAGLE3, algorithm="mtp", layer_ids=(2,), extra={"beta": 0.6, "norm_output": True}), QWEN3, 2),
    "dspark": DSPARK,
    "dspark-reduced": replace(DSPARK, draft_vocab_size=2),
    "dspark-rnn": replace(DSPARK, markov_head="rnn"),
    "dflash": replace(DSPARK, algorithm="dflash", block_size=3, sample_from_anchor=False, markov_rank=0, confidence_head=False),
}
SAMPLINGS = [Sampling(1.0), Sampling(0.6), Sampling(1.0, 2, 0.9, 0.15), Sampling(0.6, 2, 0.9, 0.15)]


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


class Forgetful(FullVocabulary):
    """Says that a block was drawn from its states alone, as if no token depended on the one before it."""

    def draft(self, anchor: int, count: int, **how: Any) -> Any:
        session: Any = self.inner
        draft: Draft = session.draft(anchor, count, **how)
        return replace(draft, probs=(session._picker.head(session.states(anchor)[:count]) / how["temperature"]).softmax(-1))


def enumerate_draws(monkeypatch: pytest.MonkeyPatch, chance: Enumerated, ids: Tensor | None) -> None:
    """Have the sessions' own draws made by `chance`: those of chains one by one, those of a block by random numbers that lead to its choice."""
    monkeypatch.setattr(eagle_session, "draw", lambda probs, generator: chance.pick(probs))

    def sample(picker: TokenPicker, base: Tensor, z: Tensor, anchor: int, temperature: float, generator: None) -> tuple[list[int], Tensor]:
        # Which token each slot draws after the one before it, by the definition; then the picker with noise that makes it so.
        race, state, previous = torch.ones_like(base), None, anchor
        for k, row in enumerate(base):
            logits = row
            if picker.markov is not None:
                bias, state = picker.markov.step(z[k], picker.markov.embed(torch.tensor(previous)), state)
                logits = row + picker.markov.markov_w2.weight @ bias
            choice = chance.pick((logits / temperature).softmax(-1))
            race[k, choice], previous = 0.0, choice if ids is None else int(ids[choice])
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "exponential_", lambda tensor, generator: tensor.copy_(race))
            return REAL_SAMPLE(picker, base, z, anchor, temperature, generator)

    monkeypatch.setattr(TokenPicker, "_sample", sample)


REAL_SAMPLE = TokenPicker._sample


def written(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: type[FullVocabulary] = FullVocabulary,
    sampling: Sampling = SAMPLINGS[0],
    rule: Rejection = "token",
    threshold: float | None = None,
) -> tuple[float, int]:
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
        enumerate_draws(monkeypatch, chance, ids)
        ways.append(1)
        done = decode_speculative(
            SpeakingTarget(target),
            session,
            PROMPT,
            draft_tokens=2,
            max_new_tokens=LENGTH,
            eos_ids={1},
            rejection=rule,
            lengths=None if threshold is None else StaticThreshold(threshold),
            chance=chance,
            **asdict(sampling),
        )
        return tuple(done.tokens)

    return distance(all_outcomes(program), texts(by_hand(target, sampling), PROMPT, LENGTH, {1})), len(ways)


@pytest.mark.lossless
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_texts_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch, name: str, sampling: Sampling, rule: Rejection) -> None:
    off, ways = written(monkeypatch, name, sampling=sampling, rule=rule)
    assert off < 1e-9
    assert ways > (100 if sampling.top_k is None else 10)


@pytest.mark.lossless
@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafts_below_a_threshold_are_not_verified_and_texts_stay(monkeypatch: pytest.MonkeyPatch, rule: Rejection) -> None:
    whole = written(monkeypatch, "dspark", rule=rule)[1]
    off, ways = written(monkeypatch, "dspark", rule=rule, threshold=0.7)
    assert off < 1e-9
    assert ways != whole, "the threshold cuts some rounds"


@pytest.mark.lossless
@pytest.mark.parametrize(("name", "kind"), [("eagle3-reduced", Liar), ("dspark", Forgetful), ("dspark-rnn", Forgetful)])
def test_distributions_that_were_not_drawn_from_are_caught(monkeypatch: pytest.MonkeyPatch, name: str, kind: type[FullVocabulary]) -> None:
    off, _ = written(monkeypatch, name, kind)
    assert off > 1e-3


def test_the_cuts_take_something_away() -> None:
    target = random_table(VOCAB, 3)
    for sampling in SAMPLINGS[2:]:
        whole, cut = (texts(by_hand(target, s), PROMPT, LENGTH, {1}) for s in (Sampling(sampling.temperature), sampling))
        assert distance(whole, cut) > 1e-2
