"""Templates tried before a run: which are refused, and of which a user should know something."""

from __future__ import annotations

from typing import Any

import pytest
from prompt_templates import CHATML, CODER, ENDLESS, GEMMA, GLM, LLAMA3, PHI3, QWEN3, REWRITER, SHOUTER, THINKER, byte_level, metaspace

from firesteel.errors import TemplateError
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.trial import hides_tools, try_template

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}}]
# Opens a block of reasoning and shows none in any turn, as DeepSeek-R1 does.
HIDER = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
# No token ends an answer but the one that begins the next turn, which is what the target emits (GLM-4).
OPEN_ENDED = """{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"""
SINGLE = """{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}\
{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, THINKER, PHI3, CODER, OPEN_ENDED, SINGLE])
def test_templates_that_show_answers_as_they_were_given(template: str) -> None:
    assert try_template(byte_level(template)) is None
    assert try_template(metaspace(template)) is None


@pytest.mark.parametrize(
    ("template", "words"), [(QWEN3, "without its reasoning"), (GLM, None), (HIDER, "otherwise than it began")], ids=["qwen3", "glm", "hider"]
)
def test_templates_that_rewrite_history_are_told_of(template: str, words: str | None) -> None:
    found = try_template(byte_level(template))
    assert found is None if words is None else words in str(found)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS, r"no end-of-turn token after an answer \(it puts '\\nuser: '\)"),
        (SHOUTER, "does not show an answer's text as it is"),
        (REWRITER, "renders a question otherwise once it is answered: 'open.*' became 'done"),
        (None, "no chat template"),
    ],
)
def test_templates_that_cannot_be_aligned_are_refused_with_the_mend(template: str | None, words: str) -> None:
    with pytest.raises(TemplateError, match=words + r"(.|\n)*target\.chat_template=FILE"):
        try_template(byte_level(template))


def test_a_token_that_ends_the_targets_texts_need_not_be_special() -> None:
    tokenizer = byte_level(ENDLESS.replace("m.content + '", "m.content + '</think>"))
    with pytest.raises(TemplateError, match="no end-of-turn token"):
        try_template(tokenizer)
    assert try_template(tokenizer, [tokenizer.convert_tokens_to_ids("</think>")]) is None


def test_tools_that_are_not_shown() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Cold?"}]
    for template, hidden in [(CHATML, False), (CODER, False), (LLAMA3, True), (QWEN3, True)]:
        assert hides_tools(byte_level(template), Prompt("p", "qa", messages, TOOLS)) is hidden
        assert hides_tools(byte_level(template), Prompt("p", "qa", messages)) is False
    picky = byte_level(LLAMA3 + "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}")
    assert hides_tools(picky, Prompt("p", "qa", messages, TOOLS)) is False
