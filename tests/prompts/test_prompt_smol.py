"""A real tokenizer, where one is at hand: FIRESTEEL_TEST_TOKENIZER names a folder with a ChatML model's tokenizer."""

from __future__ import annotations

import os
from typing import Any

import pytest

from firesteel.prompts.conversation import Conversation, Prompt
from firesteel.prompts.parts import AnswerParts
from firesteel.prompts.sources import load_source
from firesteel.prompts.template import AnsweredTurn, build_document, encode_prompt, prompt_tokens, render_conversation, template_facts
from firesteel.prompts.trial import hides_tools, try_template
from firesteel.recipe import Source
from firesteel.responses.answers import find_answers_file, read_answers

FOLDER = os.environ.get("FIRESTEEL_TEST_TOKENIZER", "")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if not FOLDER:
        pytest.skip("FIRESTEEL_TEST_TOKENIZER names no folder")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def test_ids_are_those_of_transformers(tokenizer: Any) -> None:
    for prompt in load_source(Source(builtin="nine-domains", split="eval")).prompts:
        wanted = tokenizer.apply_chat_template(prompt.history([]), tools=prompt.tools, add_generation_prompt=True)["input_ids"]
        assert encode_prompt(tokenizer, prompt.history([]), prompt.tools) == wanted
        assert prompt_tokens(tokenizer, prompt) >= len(wanted)


def test_answers_given_as_text_and_as_ids_make_the_same_document(tokenizer: Any) -> None:
    prompt = Prompt("p", "qa", [{"role": "user", "content": "Why?"}, {"role": "user", "content": "And so?"}])
    replies = ["Because of 12 things.\n\n- one\n- two", "  So it is: ça va 你好."]
    ids = [tokenizer(r + "<|im_end|>", add_special_tokens=False)["input_ids"] for r in replies]
    generated = build_document(tokenizer, prompt, [AnsweredTurn(i, r, "stop") for i, r in zip(ids, replies, strict=True)])
    conversation: Conversation = prompt.filled([{"role": "assistant", "content": r} for r in replies], ["stop", "stop"])
    written = render_conversation(tokenizer, conversation)
    assert [(d.token_ids, d.loss_mask) for d in generated] == [(d.token_ids, d.loss_mask) for d in written]
    assert len(written) == 1
    assert [i for i, m in zip(written[0].token_ids, written[0].loss_mask, strict=True) if m] == ids[0] + ids[1]


def test_facts(tokenizer: Any) -> None:
    facts = template_facts(tokenizer)
    assert (facts.system, facts.end) == (True, "<|im_end|>")
    assert try_template(tokenizer) is None


def test_the_answers_that_ship_stay_whole(tokenizer: Any) -> None:
    """No marker and no call is known to this target: what is on file is what would be written today, with tools on offer too."""
    parts, tools = AnswerParts(tokenizer), load_source(Source(builtin="tool_call", split="eval")).prompts[0].tools
    assert parts.markers is None
    asked = encode_prompt(tokenizer, [{"role": "user", "content": "Why?"}], tools)
    for answered in list(read_answers(find_answers_file("builtin:smollm2")).values())[::20]:
        assert [parts.turn(asked, t.token_ids, t.finish_reason, tools) for t in answered.turns] == answered.turns


def test_tools_are_not_shown(tokenizer: Any) -> None:
    prompts = load_source(Source(builtin="nine-domains", split="eval")).prompts
    assert [hides_tools(tokenizer, p) for p in prompts] == [bool(p.tools) for p in prompts]
    assert any(p.tools for p in prompts)
