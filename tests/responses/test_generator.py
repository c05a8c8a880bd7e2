"""The target's answers do not depend on which engine writes them, how many are written at a time, or in which order."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from firesteel.responses import generator as module
from firesteel.responses.generate import Answer, Ask, Sampling
from firesteel.responses.generator import Generator

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).eval()


def make_asks(count: int) -> list[Ask]:
    draw = torch.Generator().manual_seed(1)
    return [Ask(f"ask/{i}", torch.randint(60, (int(torch.randint(1, 40, (), generator=draw)),), generator=draw).tolist()) for i in range(count)]


def alone(model: torch.nn.Module, ask: Ask, most: int, ends: set[int]) -> Answer:
    """Greedy, one prompt, the whole text read anew for every token."""
    tokens: list[int] = []
    while len(tokens) < most:
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([ask.token_ids + tokens])).logits[0, -1].argmax()))
        if tokens[-1] in ends:
            return Answer(tokens, "stop")
    return Answer(tokens, "length")


@pytest.mark.parametrize("flat", [True, False], ids=["blocks", "padded"])
@pytest.mark.parametrize("size", [1, 3, 20])
def test_answers_are_those_of_each_prompt_alone(flat: bool, size: int) -> None:
    model, asks, ends = make_model(), make_asks(9), [3, 17, 29]
    generator = Generator(model, size, "float32")
    if not flat:
        generator._flat = False
    answers = generator.answers(asks, Sampling(12), ends)
    assert answers == [alone(model, ask, 12, set(ends)) for ask in asks]
    assert {a.finish_reason for a in answers} == {"stop", "length"}, "both ends want proving"
    assert (generator._paged is not None) == flat


def test_little_memory_makes_prompts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asks = make_model(), make_asks(9)
    expected = Generator(model, 9, "float32").answers(asks, Sampling(12), [3])
    monkeypatch.setattr(module, "free_memory", lambda: 1)
    poor = Generator(model, 9, "float32")
    assert poor.answers(asks, Sampling(12), [3]) == expected
    assert poor._paged is not None
    assert poor._paged.blocks < 9


def test_sampled_answers_depend_on_the_prompt_alone() -> None:
    model, asks = make_model(), make_asks(8)
    sampling = Sampling(10, temperature=0.9, top_p=0.9, seed=5)
    first = Generator(model, 8, "float32").answers(asks, sampling, [3])
    again = Generator(model, 3, "float32").answers(asks[::-1], sampling, [3])[::-1]
    assert first == again
    assert first != Generator(model, 8, "float32").answers(asks, Sampling(10, temperature=0.9, top_p=0.9, seed=6), [3])


def test_a_later_turn_may_be_longer() -> None:
    model, asks = make_model(), make_asks(3)
    generator = Generator(model, 2, "float32")
    generator.answers(asks, Sampling(4), [3])
    longer = [Ask("long", list(range(50)) * 2)]
    assert generator.answers(longer, Sampling(20), [3]) == [alone(model, longer[0], 20, {3})]


def test_half_precision_says_much_the_same() -> None:
    """Rounded products, whole logits: first tokens are the same but where the target itself hesitates."""
    model, asks = make_model(), make_asks(40)
    generator = Generator(model, 8, "bfloat16")
    first = [a.token_ids[0] for a in generator.answers(asks, Sampling(1), [3])]
    assert generator.half == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([a.token_ids])).logits[0, -1] for a in asks])
    lost = logits.max(-1).values - logits.gather(1, torch.tensor(first)[:, None])[:, 0]
    assert float(lost.max()) < 0.05 * float(logits.std())


def test_a_target_that_is_not_lean_in_a_detail_answers_for_itself() -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, layer_types=["full_attention"] * 2, rope_parameters=rope)).eval()
    generator, ask = Generator(model, 2), Ask("a", [1, 2, 3])
    assert generator.answers([ask], Sampling(5), [3]) == [alone(model, ask, 5, {3})]
    assert generator._paged is None


def test_a_sliding_window_shorter_than_the_text_answers_for_itself() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).eval()
    generator = Generator(model, 2, "float32")
    short, long = Ask("short", [1, 2, 3]), Ask("long", list(range(30)))
    assert generator.answers([short], Sampling(4), [59]) == [alone(model, short, 4, {59})]
    assert generator._paged is not None
    assert generator.answers([long, short], Sampling(4), [59]) == [alone(model, a, 4, {59}) for a in (long, short)]
