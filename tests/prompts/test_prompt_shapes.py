from __future__ import annotations

from typing import Any

import pytest

from firesteel.prompts.conversation import Conversation, Prompt, answer_slots, prompt_from_row
from firesteel.prompts.dropped import Dropped
from firesteel.prompts.shapes import Parsed, Skipped, parse_conversation, parse_row

U, A, S, T = "user", "assistant", "system", "tool"


def parse(row: object) -> Parsed | Skipped:
    return parse_row(row, where="f.jsonl:3", domain="file", name="f-3")


def turns(row: object) -> list[tuple[str, str]]:
    parsed = parse(row)
    assert isinstance(parsed, Parsed), parsed
    return [(m["role"], m["content"]) for m in parsed.prompt.messages]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, [(U, "hi")]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, [(U, "a\nb")]),
        ({"messages": {"role": ["system", "user"], "content": ["be", "hi"]}}, [(S, "be"), (U, "hi")]),
        ({"conversations": [{"from": "system", "value": "be"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, [(S, "be"), (U, "hi")]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]}, [(U, "a"), (A, "b"), (U, "c")]),
        ({"conversations": [{"from": "human", "value": "hi"}], "system": "be"}, [(S, "be"), (U, "hi")]),
        ({"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}], "system": "other"}, [(S, "own"), (U, "hi")]),
        ({"prompt": " hi ", "response": "yo"}, [(U, " hi ")]),
        ({"prompt": "hi", "system": "be"}, [(S, "be"), (U, "hi")]),
        ({"prompt": [{"role": "user", "content": "hi"}]}, [(U, "hi")]),
        ({"turns": ["a", "b"]}, [(U, "a"), (U, "b")]),
        ({"question": "why?"}, [(U, "why?")]),
        ({"instruction": "sum", "input": "1 2", "output": "3"}, [(U, "sum\n\n1 2")]),
        ({"instruction": "sum", "input": ""}, [(U, "sum")]),
        ({"messages": None, "prompt": "hi"}, [(U, "hi")]),
    ],
)
def test_shapes_as_people_have_them(row: object, wanted: list[tuple[str, str]]) -> None:
    assert turns(row) == wanted


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "hi"}, "unknown shape"),
        ([1], "a row that is a list, not an object"),
        ({"messages": []}, "no user turn"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}, "an answer before any user turn"),
        ({"prompt": " \n"}, "empty content"),
        ({"turns": ["a", ""]}, "empty content"),
        ({"turns": "a"}, "`turns` that is not a list of texts"),
        ({"messages": [{"role": "user"}]}, "empty content"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "unknown role"),
        ({"messages": [{"content": "x"}]}, "a turn without a role"),
        ({"messages": ["x"]}, "a turn that is not an object"),
        ({"messages": "x"}, "turns that are not a list"),
        ({"messages": {"role": ["user", "assistant"], "content": ["x"]}}, "columns of unequal length"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "content that is not text"),
        ({"messages": [{"role": "user", "content": 3}]}, "content that is not text"),
        ({"prompt": "hi", "tools": "[{"}, "malformed tools"),
        ({"prompt": "hi", "tools": [{"x": 1}]}, "malformed tools"),
        ({"prompt": "half a pair: \ud83d"}, "invalid Unicode"),
        ({"prompt": "hi", "system": 3}, "a system prompt that is not text"),
    ],
)
def test_rows_that_fit_nothing_say_why(row: object, reason: str) -> None:
    assert parse(row) == Skipped(reason)


def test_labels_and_notes() -> None:
    bare, full = parse({"prompt": "hi"}), parse({"turns": ["hi"], "id": 7, "domain": "qa"})
    assert isinstance(bare, Parsed)
    assert isinstance(full, Parsed)
    assert (bare.prompt.id, bare.prompt.domain, bare.prompt.source, bare.notes) == ("f-3", "file", "f.jsonl:3", ())
    assert (full.prompt.id, full.prompt.domain) == ("7", "qa")
    noted = parse({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]})
    assert isinstance(noted, Parsed)
    assert len(noted.prompt.messages) == 1
    assert noted.notes == ("an empty system turn was left out", "the answer in the file was left out: the target answers itself")


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    "call",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}, "type": "function"}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ],
)
def test_tool_calls_become_objects_and_answers_stay_due_after_tool_turns(call: dict[str, Any]) -> None:
    row = {"conversations": [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "", "name": "f"}, {"role": "assistant", "content": "a"}]}
    parsed = parse(row | {"tools": '[{"name": "f", "parameters": {}}]'})
    assert isinstance(parsed, Parsed)
    assert parsed.prompt.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert parsed.prompt.messages[2] == {"role": "tool", "content": "", "name": "f"}
    assert parsed.prompt.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert parsed.prompt.slots == [3]


def test_reading_does_not_change_the_row() -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    parse(row)
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]


def test_complete_conversations_keep_their_answers() -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "reasoning": "r"}]}
    made = parse_conversation(row, where="f:1", domain="d", name="n")
    assert isinstance(made, Conversation)
    assert made.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "r"}
    assert made.finish_reasons == ("stop",)
    for bad in ({"prompt": "q"}, {"messages": []}):
        assert isinstance(parse_conversation(bad, where="f:1", domain="d", name="n"), Skipped)


@pytest.mark.parametrize(
    ("roles", "slots"),
    [
        ([U], [1]),
        ([S, U, U], [2, 3]),
        ([U, A, U], [3]),
        ([U, A, T, T], [4]),
        ([U, A, T, U], [3, 4]),
        ([U, T, U], [1, 2, 3]),
        ([U, A], []),
    ],
)
def test_where_answers_are_due(roles: list[str], slots: list[int]) -> None:
    assert answer_slots([{"role": r, "content": "x"} for r in roles]) == slots


def test_prompts_are_answered_turn_by_turn() -> None:
    a, b, c = ({"role": U, "content": t} for t in "abc")
    old = {"role": A, "content": "old"}
    new = [{"role": A, "content": t} for t in "xy"]
    prompt = Prompt("p", "d", [a, old, b, c])
    assert prompt.slots == [3, 4]
    assert prompt.history([]) == [a, old, b]
    assert prompt.history(new[:1]) == [a, old, b, new[0], c]
    filled = prompt.filled(new, ["length", "stop"])
    assert filled.messages == [a, old, b, new[0], c, new[1]]
    assert filled.finish_reasons == ("given", "length", "stop")
    assert prompt.filled(new[:1], ["stop"]).messages == [a, old, b, new[0]]
    twice = [new[0], new[0]]
    assert prompt.filled(twice, ["length", "stop"]).finish_reasons == ("given", "length", "stop")


def test_keys_are_of_content_only() -> None:
    one = Prompt("a", "d", [{"role": U, "content": "x"}], None, "s")
    same = Prompt("b", "e", [{"content": "x", "role": U}], None, "t")
    tooled = Prompt("a", "d", [{"role": U, "content": "x"}], [{"type": "function"}], "s")
    assert one.key == same.key
    assert len({one.key, tooled.key, Prompt("a", "d", [{"role": U, "content": "y"}]).key}) == 3
    assert prompt_from_row(one.to_row()) == one


def test_dropped_counts_by_reason_with_the_first_example() -> None:
    first, second = Dropped(), Dropped()
    first.add("a", "f:1")
    second.add("b", "g:1")
    second.add("a", "g:2")
    second.add("b", "g:3")
    first.merge(second)
    assert first.total == 4
    assert first.lines() == ["2 x a (first: f:1)", "2 x b (first: g:1)"]
    assert first.to_dict() == {"a": {"count": 2, "first": "f:1"}, "b": {"count": 2, "first": "g:1"}}
