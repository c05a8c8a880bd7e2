from __future__ import annotations

from functools import cache

import pytest
from prompt_templates import CHATML, GEMMA, LLAMA3, SHOUTER, byte_level

from firesteel.errors import TemplateError
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.synthesis import accept_synthesized, synthesis_prefix

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
