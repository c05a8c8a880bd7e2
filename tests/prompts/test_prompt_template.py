"""Token ids and loss masks: every expected text below is written out by hand, none is computed by the room itself."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_templates import CHATML, ENDLESS, GEMMA, LLAMA3, PHI3, QWEN3, REWRITER, SHOUTER, THINKER, byte_level, metaspace

from firesteel.errors import DataError, TemplateError
from firesteel.prompts.conversation import Conversation, Prompt
from firesteel.prompts.dropped import Dropped
from firesteel.prompts.template import (
    AnsweredTurn,
    Document,
    answer_text,
    build_document,
    encode_prompt,
    keep_fitting,
    prompt_tokens,
    render_conversation,
    supervised_tokens,
    template_facts,
)

byte_level = cache(byte_level)
metaspace = cache(metaspace)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, reasoning: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})


def talk(*messages: dict[str, Any], finish: tuple[Any, ...] | None = None, tools: Any = None) -> Conversation:
    answers = sum(m["role"] == "assistant" for m in messages)
    return Conversation("row", "qa", list(messages), finish or ("stop",) * answers, tools, "chats.jsonl:7")


def runs(tokenizer: Any, document: Document) -> list[tuple[bool, str]]:
    """The document as (supervised, text) pieces, decoded from the tokens alone."""
    assert len(document.token_ids) == len(document.loss_mask)
    pairs = zip(document.loss_mask, document.token_ids, strict=True)
    return [(mask, tokenizer.decode([i for _, i in group], skip_special_tokens=False)) for mask, group in itertools.groupby(pairs, key=lambda p: p[0])]


def test_chatml_supervises_each_answer_and_its_end_and_nothing_else() -> None:
    tokenizer = byte_level(CHATML)
    [document] = render_conversation(tokenizer, talk({"role": "system", "content": "Be kind."}, user("Hi"), said("Hello"), user("Two?"), said("Four.")))
    assert runs(tokenizer, document) == [
        (False, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Hello<|im_end|>"),
        (False, "\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Four.<|im_end|>"),
    ]
    assert document.turns == (0, 1)
    assert document.domain == "qa"
    assert document.source == "chats.jsonl:7"


def test_llama3_template_that_trims_supervises_the_trimmed_text() -> None:
    tokenizer = byte_level(LLAMA3)
    [document] = render_conversation(tokenizer, talk(user(" Hi "), said("\n  Hello \n"), user("Again"), said("Yes")))
    assert runs(tokenizer, document) == [
        (False, "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (True, "Hello<|eot_id|>"),
        (False, "<|start_header_id|>user<|end_header_id|>\n\nAgain<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (True, "Yes<|eot_id|>"),
    ]


def test_gemma_has_a_model_role_and_refuses_system_turns_by_row() -> None:
    tokenizer = byte_level(GEMMA)
    [document] = render_conversation(tokenizer, talk(user("Hi"), said("Hello")))
    assert runs(tokenizer, document) == [(False, "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"), (True, "Hello<end_of_turn>")]
    with pytest.raises(TemplateError, match=r"chats\.jsonl:7.*System role not supported"):
        render_conversation(tokenizer, talk({"role": "system", "content": "x"}, user("Hi"), said("Hello")))


def test_qwen3_drops_old_reasoning_so_each_answer_gets_its_document() -> None:
    tokenizer = byte_level(QWEN3)
    first, second = render_conversation(tokenizer, talk(user("Two?"), said("Four.", "2+2"), user("Sure?"), said("Yes.", "again")))
    assert runs(tokenizer, first) == [
        (False, "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>\n2+2\n</think>\n\nFour.<|im_end|>"),
    ]
    assert runs(tokenizer, second) == [
        (
            False,
            "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "<think>\nagain\n</think>\n\nYes.<|im_end|>"),
    ]
    assert (first.turns, second.turns) == ((0,), (1,))
    assert first.key != second.key
    assert first.prompt_key == second.prompt_key


def test_think_supplied_by_the_generation_prompt_is_not_supervised() -> None:
    tokenizer = byte_level(THINKER)
    [document] = render_conversation(tokenizer, talk(user("Two?"), said("Four.", "2+2")))
    assert runs(tokenizer, document) == [
        (False, "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (True, "2+2\n</think>\n\nFour.<|im_end|>"),
    ]
    with pytest.raises(TemplateError, match=r"chats\.jsonl:7, turn 1.*\n.*reasoning_content"):
        render_conversation(tokenizer, talk(user("Two?"), said("Four.")))


def test_what_stands_after_the_end_token_is_not_supervised() -> None:
    tokenizer = byte_level(PHI3)
    [document] = render_conversation(tokenizer, talk(user("Hi"), said("Hello"), user("And?"), said("Bye")))
    assert runs(tokenizer, document) == [
        (False, "<|user|>\nHi<|end|>\n<|assistant|>\n"),
        (True, "Hello<|end|>"),
        (False, "\n<|user|>\nAnd?<|end|>\n<|assistant|>\n"),
        (True, "Bye<|end|>"),
    ]


def test_tool_calls_are_supervised_and_tool_results_are_not() -> None:
    tokenizer = byte_level(CHATML)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = said("Wait.") | {"tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}
    [document] = render_conversation(tokenizer, talk(user("Cold?"), call, {"role": "tool", "content": "-3"}, said("Yes."), tools=tools))
    pieces = runs(tokenizer, document)
    assert [text for mask, text in pieces if mask] == [
        'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
        "Yes.<|im_end|>",
    ]
    assert pieces[0][1].startswith('<|im_start|>system\nTools: [{"type": "function"')
    assert pieces[2] == (False, "\n<|im_start|>tool\n-3<|im_end|>\n<|im_start|>assistant\n")


def test_a_cut_answer_teaches_no_end() -> None:
    tokenizer = byte_level(CHATML)
    [document] = render_conversation(tokenizer, talk(user("Hi"), said("Hello there and"), user("Go on"), said("so"), finish=("length", "length")))
    assert [text for mask, text in runs(tokenizer, document) if mask] == ["Hello there and", "so"]
    assert document.finish_reasons == ("length", "length")
    assert "<|im_end|>\n<|im_start|>user\nGo on" in runs(tokenizer, document)[2][1]


def test_given_answers_are_context_only() -> None:
    tokenizer = byte_level(CHATML)
    [document] = render_conversation(tokenizer, talk(user("Hi"), said("Hello"), user("Two?"), said("Four."), finish=("given", "stop")))
    assert [text for mask, text in runs(tokenizer, document) if mask] == ["Four.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (REWRITER, r"chats\.jsonl:7, turn 1: the chat template renders the conversation otherwise.*'open"),
        (SHOUTER, r"chats\.jsonl:7, turn 1: the chat template does not show the answer's text"),
        (ENDLESS, r"chats\.jsonl:7, turn 1: the chat template puts no end-of-turn token"),
        (None, r"no chat template\n  -> .*target\.chat_template=FILE"),
    ],
)
def test_templates_that_cannot_be_aligned_are_refused_by_row_and_turn(template: str | None, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render_conversation(byte_level(template), talk(user("Hi"), said("hello")))


def test_a_later_turn_is_named_when_it_is_the_one_that_fails() -> None:
    with pytest.raises(TemplateError, match=r"chats\.jsonl:7, turn 2"):
        render_conversation(byte_level(THINKER), talk(user("a"), said("b", "c"), user("d"), said("e")))


def test_a_broken_message_names_the_row() -> None:
    with pytest.raises(TemplateError, match=r"refuses chats\.jsonl:7"):
        render_conversation(byte_level(LLAMA3 + "{{ 1 + messages[0].content }}"), talk(user("a"), said("b")))


def test_a_newline_that_would_join_the_generation_prompt_is_a_token_of_its_own() -> None:
    tokenizer = byte_level(CHATML)
    joined = tokenizer("<|im_start|>assistant\n\n", add_special_tokens=False)["input_ids"]
    parts = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("<|im_start|>assistant\n", "\n")]
    assert joined != parts[0] + parts[1], "the tokenizer must merge newlines for this test to test anything"
    [document] = render_conversation(tokenizer, talk(user("Hi"), said("\nHello")))
    assert document.token_ids[: document.loss_mask.index(True)] == encode_prompt(tokenizer, [user("Hi")])
    assert runs(tokenizer, document)[1] == (True, "\nHello<|im_end|>")


def test_a_prompt_whose_last_tokens_change_with_what_follows_splits() -> None:
    tokenizer = byte_level(LLAMA3, gpt2=True)
    conversation = talk(user("Hi"), said("Hello"), user("Again"), said("Yes"))
    first, second = render_conversation(tokenizer, conversation)
    assert first.token_ids[: first.loss_mask.index(True)] == encode_prompt(tokenizer, conversation.messages[:1])
    assert second.token_ids[: second.loss_mask.index(True)] == encode_prompt(tokenizer, conversation.messages[:3])
    assert [[text for mask, text in runs(tokenizer, d) if mask] for d in (first, second)] == [["Hello<|eot_id|>"], ["Yes<|eot_id|>"]]


def test_a_tokenizer_that_puts_a_space_before_each_text_adds_none_to_the_answer() -> None:
    tokenizer = metaspace(PHI3.replace("\\n", ""))
    [document] = render_conversation(tokenizer, talk(user("two"), said("four")))
    whole = "<|user|>two<|end|><|assistant|>four<|end|>"
    assert document.token_ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(document.token_ids[document.loss_mask.index(True) :])[-1] == "<|end|>"


ODD = st.one_of(
    st.text(max_size=30).filter(lambda t: not any("\ud800" <= c <= "\udfff" for c in t)),
    st.lists(
        st.sampled_from(["\n", " ", "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "<|eot_id|>", "é", "你好", "🔥", "Hello", "\t", "{{ x }}"]),
        max_size=6,
    ).map("".join),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ODD, ODD, st.booleans()), min_size=1, max_size=3))
def test_any_content_is_supervised_exactly(turns: list[tuple[str, str, bool]]) -> None:
    tokenizer = byte_level(CHATML)
    messages = [m for asked, answered, _ in turns for m in (user(asked), said(answered))]
    conversation = talk(*messages, finish=tuple("stop" if whole else "length" for *_, whole in turns))
    documents = render_conversation(tokenizer, conversation)
    learned = {}
    for document in documents:
        starts = [i for i, m in enumerate(document.loss_mask) if m and not document.loss_mask[i - 1]]
        emitting = [t for t in document.turns if turns[t][1] or turns[t][2]]
        for turn, start in zip(emitting, starts, strict=True):
            # What stands before an answer is exactly what the target would be given there.
            assert document.token_ids[:start] == encode_prompt(tokenizer, messages[: 2 * turn + 1])
            end = next((i for i in range(start, len(document.loss_mask)) if not document.loss_mask[i]), len(document.loss_mask))
            learned[turn] = tokenizer.decode(document.token_ids[start:end], skip_special_tokens=False)
    assert learned == {t: answered + ("<|im_end|>" if whole else "") for t, (_, answered, whole) in enumerate(turns) if answered or whole}


@settings(max_examples=40, deadline=None)
@given(ODD, ODD, st.sampled_from([LLAMA3, GEMMA, QWEN3, PHI3]))
def test_a_whole_answer_is_what_the_template_renders_after_the_prompt(asked: str, answered: str, template: str) -> None:
    tokenizer = byte_level(template)
    [document] = render_conversation(tokenizer, talk(user(asked), said(answered)))
    whole = tokenizer.apply_chat_template([user(asked), said(answered)], tokenize=False)
    text = tokenizer.decode(document.token_ids, skip_special_tokens=False)
    assert whole.startswith(text)
    assert whole[len(text) :] in ("", "\n", "\n<|endoftext|>")
    assert document.loss_mask == sorted(document.loss_mask)
    assert document.token_ids[: document.loss_mask.index(True)] == encode_prompt(tokenizer, [user(asked)])


def answer(tokenizer: Any, text: str, end: str | None = "<|im_end|>") -> AnsweredTurn:
    ids = tokenizer(text + (end or ""), add_special_tokens=False)["input_ids"]
    return AnsweredTurn(ids, answer_text(tokenizer, ids, "stop" if end else "length"), "stop" if end else "length")


def test_generated_turns_share_a_document_when_their_tokens_agree() -> None:
    tokenizer = byte_level(CHATML)
    prompt = Prompt("p", "writing", [user("Hi"), user("More"), user("Last")], None, "builtin:1")
    turns = [answer(tokenizer, "Hello"), answer(tokenizer, "cut", end=None), answer(tokenizer, "Bye")]
    [document] = build_document(tokenizer, prompt, turns)
    assert runs(tokenizer, document) == [
        (False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Hello<|im_end|>"),
        (False, "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"),
        (True, "cut"),
        (False, "<|im_end|>\n<|im_start|>user\nLast<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Bye<|im_end|>"),
    ]
    assert document.finish_reasons == ("stop", "length", "stop")
    assert document.prompt_key == prompt.key


def test_generated_ids_that_retokenise_otherwise_are_kept_and_split() -> None:
    tokenizer = byte_level(CHATML)
    prompt = Prompt("p", "writing", [user("Hi"), user("More")], None, "builtin:1")
    bytewise = [i for c in "Hello" for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
    ids = [*bytewise, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert ids != tokenizer("Hello<|im_end|>", add_special_tokens=False)["input_ids"]
    odd = AnsweredTurn(ids, "Hello", "stop")
    first, second = build_document(tokenizer, prompt, [odd, answer(tokenizer, "Bye")])
    assert first.token_ids == encode_prompt(tokenizer, [user("Hi")]) + ids
    assert second.token_ids[: second.loss_mask.index(True)] == encode_prompt(tokenizer, [user("Hi"), said("Hello"), user("More")])
    assert [text for mask, text in runs(tokenizer, second) if mask] == ["Bye<|im_end|>"]


def test_generated_reasoning_that_history_drops_splits() -> None:
    tokenizer = byte_level(QWEN3)
    prompt = Prompt("p", "qa", [user("Hi"), user("More")], None, "x:1")
    ids = tokenizer("<think>\nhm\n</think>\n\nHello<|im_end|>", add_special_tokens=False)["input_ids"]
    documents = build_document(tokenizer, prompt, [AnsweredTurn(ids, "Hello", "stop", reasoning_content="hm"), answer(tokenizer, "<think>\n\n</think>\n\nBye")])
    assert [[t for mask, t in runs(tokenizer, d) if mask] for d in documents] == [
        ["<think>\nhm\n</think>\n\nHello<|im_end|>"],
        ["<think>\n\n</think>\n\nBye<|im_end|>"],
    ]


def test_answers_without_tokens_make_no_document() -> None:
    tokenizer = byte_level(CHATML)
    assert build_document(tokenizer, Prompt("p", "qa", [user("Hi")]), [AnsweredTurn([], "", "length")]) == []
    with pytest.raises(DataError, match="no document has a supervised token"):
        supervised_tokens([])
    [document] = build_document(tokenizer, Prompt("p", "qa", [user("Hi")]), [answer(tokenizer, "")])
    assert supervised_tokens([document, document]) == {"qa": 2}


def test_prompts_that_do_not_fit_are_counted_by_reason() -> None:
    tokenizer = byte_level(GEMMA)
    short, long = Prompt("a", "qa", [user("Hi")], None, "f:1"), Prompt("b", "qa", [user("Hello there! " * 50)], None, "f:2")
    system = Prompt("c", "qa", [{"role": "system", "content": "x"}, user("Hi")], None, "f:3")
    dropped = Dropped()
    assert keep_fitting(tokenizer, [short, long, system], 60, dropped) == [short]
    assert dropped.counts == {"longer than prompts.max_tokens=60": 1, "refused by the chat template: System role not supported": 1}
    assert dropped.first["longer than prompts.max_tokens=60"] == "f:2"
    two = Prompt("d", "qa", [user("Hi"), user("Hi")])
    assert prompt_tokens(tokenizer, two) == prompt_tokens(tokenizer, short) + len(tokenizer("Hi", add_special_tokens=False)["input_ids"])
    with pytest.raises(TemplateError, match="no chat template"):
        keep_fitting(byte_level(None), [short], 60, dropped)


def test_facts_of_templates() -> None:
    chatml, gemma, endless = (template_facts(byte_level(t)) for t in (CHATML, GEMMA, ENDLESS))
    assert (chatml.system, chatml.tools, chatml.end) == (True, True, "<|im_end|>")
    assert (gemma.system, gemma.tools, gemma.end) == (False, False, "<end_of_turn>")
    assert (endless.system, endless.tools, endless.end) == (True, False, None)
