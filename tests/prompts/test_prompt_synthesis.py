from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random

import pytest
from prompt_templates import CHATML, GEMMA, LLAMA3, SHOUTER, byte_level

from firesteel.errors import TemplateError
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.synthesis import Seed, accept_synthesized, draw_seed, synthesis_prefix

byte_level = cache(byte_level)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "<|im_start|>user\n"),
        (LLAMA3, "<s><|start_header_id|>user<|end_header_id|>\n\n"),
        (GEMMA, "<s><start_of_turn>user\n"),
        ("{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}" + CHATML, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"),
    ],
)
def test_prefix_is_the_beginning_of_a_user_turn(template: str, text: str) -> None:
    tokenizer = byte_level(template)
    assert tokenizer.decode(synthesis_prefix(tokenizer), skip_special_tokens=False) == text


def test_a_template_that_alters_the_text_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"target\.chat_template=FILE"):
        synthesis_prefix(byte_level(SHOUTER))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" \n", "too short"),
        ("hi", "too short"),
        ("x" * 5000, "too long"),
        ("1 + 2 = 3, 4 + 5", "not text"),
        ("broken \ufffd bytes", "not text"),
        ("and then it goes on " * 20, "repeats itself"),
    ],
)
def test_what_is_no_prompt(text: str, reason: str) -> None:
    found = accept_synthesized(text, number=1, domain="d")
    assert isinstance(found, str)
    assert reason in found


def test_what_is_a_prompt() -> None:
    found = accept_synthesized(" How do magnets work, and why do they attract iron?\n", number=4, domain="d")
    assert isinstance(found, Prompt)
    assert found.messages == [{"role": "user", "content": "How do magnets work, and why do they attract iron?"}]
    assert (found.id, found.domain) == ("synthesized-4", "d")


def make_prompt(domain: str, text: str, *, tools: bool = False) -> Prompt:
    system = [{"role": "system", "content": f"You do {domain}."}] if tools else []
    return Prompt("p", domain, [*system, {"role": "user", "content": text}, {"role": "user", "content": "And then?"}], [{"name": "f"}] if tools else None)


def test_openings_are_first_words_under_the_same_system_turn_and_tools() -> None:
    long = " ".join(f"word{i}" for i in range(100))
    prompts = [make_prompt("code", "Write  a\nfunction that adds two numbers, please"), make_prompt("call", long, tools=True), make_prompt("short", "Why?")]
    prompts += [make_prompt("code", "Fix this bug for me now, will you")] * 20
    seeds = [draw_seed(prompts, Random(i)) for i in range(300)]
    assert all(60 < n < 140 for n in Counter(s.domain for s in seeds).values()), "domains are drawn alike, however many prompts they have"
    lengths = {len(s.opening.split()) for s in seeds if s.domain == "call"}
    assert (min(lengths), max(lengths)) == (2, 24)
    for seed in seeds:
        assert any(m["content"].startswith(seed.opening) for p in prompts if p.domain == seed.domain for m in p.messages if m["role"] == "user")
        assert bool(seed.system) == bool(seed.tools) == (seed.domain == "call")
    assert {s.opening for s in seeds if s.domain == "short"} == {"Why?"}
    assert draw_seed(prompts, Random(7)) == seeds[7]


def test_an_opened_turn_is_one_prompt() -> None:
    tokenizer = byte_level(CHATML)
    seed = Seed("Write a", "code", ({"role": "system", "content": "Be brief."},), [{"name": "f"}])
    text = tokenizer.decode(synthesis_prefix(tokenizer, seed), skip_special_tokens=False)
    assert text.endswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWrite a")
    assert '"name": "f"' in text
    found = accept_synthesized(" poem about magnets.\n", number=4, domain=None, seed=seed)
    assert isinstance(found, Prompt)
    assert found.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a poem about magnets."}]
    assert (found.domain, found.tools) == ("code", [{"name": "f"}])
    assert accept_synthesized("\n", number=4, domain=None, seed=seed) == "synthesized text too short"
