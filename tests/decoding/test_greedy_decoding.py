"""Greedy speculative decoding = plain decoding = Transformers' generate, whatever the drafter says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from decoding_toys import ToyDraft
from torch import Tensor

from firesteel.decoding.decode import Round, decode_plain, decode_speculative
from firesteel.decoding.policies import StaticThreshold
from firesteel.errors import DataError, RecipeError, VerificationError
from firesteel.target.session import TargetSession

PROMPT = [3, 14, 15, 9, 2, 6]
VOCABULARY = 61
IDS = (0, 2, 3)


@dataclass
class Oracle:
    """Knows the text and says so for the first `right` tokens of each draft; after that it lies. None: at random."""

    text: list[int]
    right: int | None
    confidences: list[float] | None = None
    aux: Tensor = field(default_factory=lambda: torch.zeros(0, 32 * len(IDS)))
    asked: list[int] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def observe(self, tokens: Sequence[int], aux: Tensor) -> None:
        """The engine must say the text's own tokens, each with its states."""
        start = len(self.aux)
        assert list(tokens) == self.text[start : start + len(aux)]
        self.aux = torch.cat([self.aux, aux])

    def rewind(self, length: int) -> None:
        self.aux = self.aux[:length]

    def draft(self, anchor: int, count: int, *, temperature: float, generator: torch.Generator | None) -> ToyDraft:
        position = len(self.aux)
        assert self.text[position] == anchor, "the anchor's position must be the first not observed"
        self.asked.append(count)
        future = (self.text[position + 1 :] + [0] * count)[:count]
        right = int(torch.randint(count + 1, (), generator=self.generator)) if self.right is None else self.right
        return ToyDraft([t if k < right else (t + 1) % VOCABULARY for k, t in enumerate(future)], None, self.confidences and self.confidences[:count])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module", params=["lean", "generic"])
def session(model, request):
    return TargetSession(model, IDS, max_length=96, engine=request.param)


@pytest.fixture(scope="module")
def reference(model):
    """The prompt and what Transformers writes after it."""
    with torch.no_grad():
        text = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40)[0].tolist()
    assert len(set(text[len(PROMPT) :])) > 8, "a text that repeats itself proves little"
    return text


@pytest.mark.lossless
def test_plain_equals_generate(session, reference):
    done = decode_plain(session, PROMPT, max_new_tokens=40, eos_ids=())
    assert done.tokens == reference[len(PROMPT) :]
    assert done.finish_reason == "length"
    assert done.rounds == []


@pytest.mark.lossless
@pytest.mark.parametrize("right", [0, 1, 3, 99, None])
@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_speculative_equals_generate(session, model, reference, right, drafts):
    oracle = Oracle(reference, right)
    done = decode_speculative(session, oracle, PROMPT, draft_tokens=drafts, max_new_tokens=40, eos_ids=())
    assert done.tokens == reference[len(PROMPT) :]
    assert sum(r.accepted + 1 for r in done.rounds) == 39, "the first token comes from the prompt's pass"
    if right is not None:
        assert all(r.accepted == min(right, r.drafted) for r in done.rounds)
    # The drafter was shown the states of exactly the text, in order.
    with torch.no_grad():
        states = model(torch.tensor([reference]), output_hidden_states=True).hidden_states
    own = torch.cat([states[0][0], states[2][0]], -1)
    torch.testing.assert_close(oracle.aux[:, :64], own[: len(oracle.aux)], atol=1e-4, rtol=1e-4)
    assert len(oracle.aux) > len(PROMPT) + 25


@pytest.mark.lossless
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.85, 1.0])
def test_threshold_changes_rounds_but_not_the_text(session, reference, threshold):
    confidences = [0.9, 0.9, 0.7, 0.5]  # products 0.9, 0.81, 0.567, 0.2835
    done = decode_speculative(
        session, Oracle(reference, 2, confidences), PROMPT, draft_tokens=4, max_new_tokens=40, eos_ids=(), lengths=StaticThreshold(threshold)
    )
    assert done.tokens == reference[len(PROMPT) :]
    submitted = {0.0: 4, 0.5: 3, 0.85: 1, 1.0: 0}[threshold]
    assert done.rounds[0] == Round(submitted, min(2, submitted), confidences)
    assert done.acceptance_length == pytest.approx(1 + sum(r.accepted for r in done.rounds) / len(done.rounds))


@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 6, 20])
def test_end_of_text_ends_it_wherever_it_falls_in_a_block(session, reference, at):
    new = reference[len(PROMPT) :]
    eos = new[at]
    first = new.index(eos)
    plain = decode_plain(session, PROMPT, max_new_tokens=40, eos_ids=(eos,))
    oracle = Oracle(reference, 99)
    done = decode_speculative(session, oracle, PROMPT, draft_tokens=4, max_new_tokens=40, eos_ids={eos, 1000})
    assert done.tokens == plain.tokens == new[: first + 1]
    assert done.finish_reason == plain.finish_reason == "stop"
    # Rounds of 4 accepted + 1: only what was kept is counted in the last.
    assert [r.accepted for r in done.rounds] == [4] * (first // 5) + ([min(4, first % 5)] if first % 5 else [])


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7])
def test_max_new_tokens_is_exact(session, reference, length):
    oracle = Oracle(reference, 99)
    done = decode_speculative(session, oracle, PROMPT, draft_tokens=4, max_new_tokens=length, eos_ids=())
    assert done.tokens == reference[len(PROMPT) : len(PROMPT) + length]
    assert done.finish_reason == "length"
    assert all(n <= length - 2 for n in oracle.asked), "no draft that could not be used"
    assert decode_plain(session, PROMPT, max_new_tokens=length, eos_ids=()).tokens == done.tokens


def test_times_add_up(session, reference):
    done = decode_speculative(session, Oracle(reference, 2), PROMPT, draft_tokens=4, max_new_tokens=20, eos_ids=())
    assert done.seconds_prefill > 0
    assert 0 < done.seconds_draft + done.seconds_verify <= done.seconds_decode


@pytest.mark.lossless
def test_same_seed_same_text_when_sampling(session):
    def texts(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return decode_plain(session, PROMPT, max_new_tokens=12, eos_ids=(), temperature=1.0, top_p=0.95, generator=generator).tokens

    assert texts(3) == texts(3)
    assert len({tuple(texts(s)) for s in range(4)}) == 4


def test_mistakes_are_named(session, reference):
    oracle = Oracle(reference, 1)
    with pytest.raises(DataError, match="no tokens"):
        decode_plain(session, [], max_new_tokens=4, eos_ids=())
    with pytest.raises(RecipeError, match="max_new_tokens=0"):
        decode_plain(session, PROMPT, max_new_tokens=0, eos_ids=())
    with pytest.raises(RecipeError, match="96 positions"):
        decode_speculative(session, oracle, PROMPT, draft_tokens=4, max_new_tokens=92, eos_ids=())
    with pytest.raises(RecipeError, match="draft_tokens=0"):
        decode_speculative(session, oracle, PROMPT, draft_tokens=0, max_new_tokens=4, eos_ids=())
    with pytest.raises(RecipeError, match="confidence head"):
        decode_speculative(session, oracle, PROMPT, draft_tokens=2, max_new_tokens=4, eos_ids=(), lengths=StaticThreshold(0.5))


def test_a_drafter_that_drafts_too_little_is_refused(session, reference, monkeypatch):
    monkeypatch.setattr(Oracle, "draft", lambda self, anchor, count, *, temperature, generator: ToyDraft([1], None, None))
    with pytest.raises(VerificationError, match="asked for 3 tokens and proposed 1"):
        decode_speculative(session, Oracle(reference, 1), PROMPT, draft_tokens=3, max_new_tokens=9, eos_ids=())


def test_the_last_position_of_the_session_can_be_used(session, reference):
    done = decode_speculative(session, Oracle(reference + [0] * 60, None), PROMPT[:1], draft_tokens=7, max_new_tokens=1, eos_ids=())
    assert len(done.tokens) == 1
    full = decode_plain(session, PROMPT, max_new_tokens=91, eos_ids=()).tokens
    spec = decode_speculative(session, Oracle(PROMPT + full, 99), PROMPT, draft_tokens=7, max_new_tokens=91, eos_ids=())
    assert spec.tokens == full
