"""Answers taken apart: what a server would show of them again. Every expected part is written out by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from prompt_templates import CHATML, CODER, GEMMA, GLM, LLAMA3, QWEN3, THINKER, byte_level

from firesteel.prompts.conversation import Prompt
from firesteel.prompts.parts import AnswerParts
from firesteel.prompts.template import AnsweredTurn, build_document, encode_prompt

byte_level = cache(byte_level)

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": PROPERTIES}}}]
# What a template that opens the block, but shows no reasoning in any turn, looks like (DeepSeek-R1).
HIDER = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn(template: str, text: str, *, tools: Any = None, reason: str = "stop") -> AnsweredTurn:
    tokenizer = byte_level(template)
    ids = tokenizer(text + ("<|im_end|>" if reason == "stop" else ""), add_special_tokens=False)["input_ids"]
    found = AnswerParts(tokenizer).turn(encode_prompt(tokenizer, [user("Hi")], tools), ids, reason, tools)
    assert found.token_ids == ids
    assert found.finish_reason == reason
    return found


def parts(found: AnsweredTurn) -> tuple[str | None, str]:
    assert found.tool_calls is None
    return found.reasoning_content, found.text


@pytest.mark.parametrize("template", [CHATML, QWEN3])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nHello", ("hm\n\nso", "Hello")),
        ("<think>\n\n</think>\n\nHello", (None, "Hello")),
        ("\n<think>hm</think>Hello", ("hm", "Hello")),
        ("<think>hm</think>\n\n  indented </think>", ("hm", "  indented </think>")),
        ("Hello <think>hm</think>", (None, "Hello <think>hm</think>")),
        ("Hello</think>", (None, "Hello</think>")),
        ("  Hello\n", (None, "  Hello\n")),
    ],
)
def test_reasoning_stands_between_the_templates_own_markers(template: str, text: str, wanted: tuple[str | None, str]) -> None:
    assert parts(turn(template, text)) == wanted


@pytest.mark.parametrize("template", [THINKER, HIDER])
def test_an_answer_begins_inside_the_block_that_the_generation_prompt_opens(template: str) -> None:
    assert parts(turn(template, "hm\n</think>\n\nHello")) == ("hm", "Hello")
    assert parts(turn(template, "<think>\nhm\n</think>\n\nHello")) == ("hm", "Hello")
    assert parts(turn(template, "</think>\n\nHello")) == (None, "Hello")
    assert parts(turn(template, "hm, and then", reason="length")) == ("hm, and then", "")


def test_a_cut_block_is_reasoning_to_its_end() -> None:
    assert parts(turn(CHATML, "<think>\nhm, and", reason="length")) == ("hm, and", "")


def test_a_block_that_the_generation_prompt_closes_again_is_over() -> None:
    closed = THINKER.replace("assistant\\n<think>\\n' }}{% endif %}", "assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}")
    assert closed != THINKER
    assert parts(turn(closed, "Hello </think> there")) == (None, "Hello </think> there")


def test_markers_are_the_templates_own_whatever_they_are_called() -> None:
    odd = THINKER.replace("<think>", "[MUSE]").replace("</think>", "[/MUSE]")
    assert AnswerParts(byte_level(odd)).markers == ("[MUSE]", "[/MUSE]")
    assert parts(turn(odd, "hm\n[/MUSE]\n\nHello")) == ("hm", "Hello")


def test_a_target_without_markers_keeps_its_answers_whole() -> None:
    bare = byte_level(GEMMA, thinks=False)
    assert AnswerParts(bare).markers is None
    ids = bare("<think>hm</think>Hello<end_of_turn>", add_special_tokens=False)["input_ids"]
    assert parts(AnswerParts(bare).turn(encode_prompt(bare, [user("Hi")]), ids, "stop")) == (None, "<think>hm</think>Hello")


def call(city: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city, **more}}}


WRITTEN = {
    CHATML: '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    CODER: "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    GLM: "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("template", [CHATML, CODER, GLM])
def test_calls_are_read_in_the_form_in_which_the_template_writes_them(template: str) -> None:
    text = WRITTEN[template]
    found = turn(template, text, tools=TOOLS)
    assert (found.text, found.tool_calls) == ("", [call("Oslo", days=3)])
    both = turn(template, f"<think>\nhm\n</think>\n\nI look.\n{text}\n{text.replace('Oslo', '12')}", tools=TOOLS)
    assert (both.reasoning_content, both.text, both.tool_calls) == ("hm", "I look.", [call("Oslo", days=3), call("12", days=3)])
    assert turn(template, text).tool_calls is None, "nothing is on offer"
    for broken in (text.removesuffix("</tool_call>"), text + " So.", text.replace("weather", '{"', 1).replace("<function=", "<")):
        whole = turn(template, broken, tools=TOOLS)
        assert (whole.text, whole.tool_calls) == (broken, None)


def test_calls_in_a_form_that_is_not_the_templates_stay_content() -> None:
    for template, other in [(CHATML, CODER), (CODER, GLM), (GLM, CODER), (LLAMA3, CHATML), (QWEN3, CHATML)]:
        found = turn(template, WRITTEN[other], tools=TOOLS)
        assert (found.text, found.tool_calls) == (WRITTEN[other], None)


def test_a_call_shows_in_the_next_turn_as_it_was_written() -> None:
    """Taken apart and rendered again, reasoning, content and call are the very tokens of the answer: one document holds both turns."""
    tokenizer = byte_level(CHATML)
    prompt = Prompt("p", "tool_call", [user("Cold?"), {"role": "tool", "content": "-3"}], TOOLS)
    texts = [f"<think>\nhm\n</think>\n\nI look.\n{WRITTEN[CHATML]}<|im_end|>", "Yes.<|im_end|>"]
    read, turns, messages = AnswerParts(tokenizer), [], []
    for text in texts:
        asked = encode_prompt(tokenizer, prompt.history(messages), TOOLS)
        turns.append(read.turn(asked, tokenizer(text, add_special_tokens=False)["input_ids"], "stop", TOOLS))
        messages.append(turns[-1].message())
    [document] = build_document(tokenizer, prompt, turns)
    assert document.turns == (0, 1)
    assert document.loss_mask.count(True) == sum(len(t.token_ids) for t in turns)
