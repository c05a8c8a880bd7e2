"""Rows as people have them, read as prompts.

Understood, row by row: `messages` (role/content, OpenAI style), `conversations` (ShareGPT: from/value), `turns`
(list of user turns), `prompt` (a text, or a list of messages), and the single-question columns of `_QUESTIONS`,
each with an optional `system` and `tools`. A row that fits none is skipped with a reason, never silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firesteel.prompts.conversation import Conversation, Message, Prompt, Tool

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "customer"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}
_QUESTIONS = ("question", "instruction", "problem", "query")
_ANSWER_DROPPED = "the answer in the file was left out: the target answers itself"
_EMPTY_SYSTEM = "an empty system turn was left out"


@dataclass(frozen=True)
class Parsed:
    """A usable row, and what was altered in reading it."""

    prompt: Prompt
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be used, and why."""

    reason: str


class _Unusable(Exception):
    """Ends the reading of a row; never leaves this module."""


def parse_row(row: object, *, where: str, domain: str, name: str) -> Parsed | Skipped:
    """Read one row as a prompt; answers at its end are left out (the target answers again) and noted.

    Args:
        where: file and line, kept as the prompt's source.
        domain: used where the row has no `domain` of its own.
        name: used where the row has no `id` of its own.
    """
    try:
        messages, tools, notes = _read(row)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
            notes.add(_ANSWER_DROPPED)
        _check_turns(messages, empty_answers=False)
        fields = row if isinstance(row, Mapping) else {}
        prompt = Prompt(_label(fields, "id", name), _label(fields, "domain", domain), messages, tools, where)
        _check_unicode(prompt)
    except _Unusable as e:
        return Skipped(str(e))
    return Parsed(prompt, tuple(sorted(notes)))


def parse_conversation(row: object, *, where: str, domain: str, name: str) -> Conversation | Skipped:
    """Read one row with its answers, to be learned as they stand (off-policy); it must end with an answer."""
    try:
        messages, tools, _ = _read(row)
        _check_turns(messages, empty_answers=True)
        if messages[-1]["role"] != "assistant":
            raise _Unusable("no answer at the end")
        fields = row if isinstance(row, Mapping) else {}
        prompt = Prompt(_label(fields, "id", name), _label(fields, "domain", domain), messages, tools, where)
        _check_unicode(prompt)
    except _Unusable as e:
        return Skipped(str(e))
    answers = sum(m["role"] == "assistant" for m in messages)
    return Conversation(prompt.id, prompt.domain, messages, ("stop",) * answers, tools, where)


def _read(row: object) -> tuple[list[Message], list[Tool] | None, set[str]]:
    if not isinstance(row, Mapping):
        raise _Unusable(f"a row that is a {type(row).__name__}, not an object")
    notes: set[str] = set()
    messages = []
    for entry in _entries(row):
        message = _message(entry)
        if message["role"] == "system" and not message["content"].strip():
            notes.add(_EMPTY_SYSTEM)
        else:
            messages.append(message)
    system = row.get("system") or row.get("system_prompt")
    if system is not None and not isinstance(system, str):
        raise _Unusable("a system prompt that is not text")
    if system and system.strip() and not any(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages, _tools(row.get("tools") or row.get("functions")), notes


def _entries(row: Mapping[str, Any]) -> list[Any]:
    """The turns of a row, as they stand in the first column that holds some."""
    for column in ("messages", "conversations", "conversation"):
        if row.get(column) is not None:
            return _turn_list(row[column])
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list) or not all(isinstance(t, str) for t in turns):
            raise _Unusable("`turns` that is not a list of texts")
        return [{"role": "user", "content": t} for t in turns]
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list | Mapping):
        return _turn_list(prompt)
    for column in _QUESTIONS:
        if isinstance(row.get(column), str):
            given = row.get("input")
            extra = f"\n\n{given}" if isinstance(given, str) and given.strip() else ""
            return [{"role": "user", "content": row[column] + extra}]
    raise _Unusable("unknown shape")


def _turn_list(turns: Any) -> list[Any]:
    if isinstance(turns, Mapping):
        # Columnar storage turns a list of structs into a struct of lists: {"role": [...], "content": [...]}.
        columns = {k: v for k, v in turns.items() if v is not None}
        if not columns or not all(isinstance(v, list) for v in columns.values()):
            raise _Unusable("unknown shape")
        if len({len(v) for v in columns.values()}) > 1:
            raise _Unusable("columns of unequal length")
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if not isinstance(turns, list):
        raise _Unusable("turns that are not a list")
    return turns


def _message(entry: Any) -> Message:
    if not isinstance(entry, Mapping):
        raise _Unusable("a turn that is not an object")
    said = entry.get("role") if entry.get("role") is not None else entry.get("from")
    if not isinstance(said, str):
        raise _Unusable("a turn without a role")
    role = _ROLES.get(said.strip().lower())
    if role is None:
        raise _Unusable("unknown role")
    message: Message = {"role": role, "content": _text(entry.get("content") if "content" in entry else entry.get("value"))}
    if said.strip().lower() == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_tool_call(_json(message["content"], "tool call"))]}
    if role == "assistant":
        reasoning = entry.get("reasoning_content") or entry.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            message["reasoning_content"] = reasoning
        calls = entry.get("tool_calls")
        if calls:
            calls = _json(calls, "tool call")
            if not isinstance(calls, list):
                raise _Unusable("malformed tool call")
            message["tool_calls"] = [_tool_call(c) for c in calls]
    if role == "tool":
        message.update({k: entry[k] for k in ("name", "tool_call_id") if isinstance(entry.get(k), str)})
    return message


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Unusable("content that is not text")
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise _Unusable("content that is not text")
        parts.append(text)
    return "\n".join(parts)


def _tool_call(call: Any) -> dict[str, Any]:
    """A call in OpenAI's shape with its arguments as an object, which is what chat templates expect."""
    if not isinstance(call, Mapping):
        raise _Unusable("malformed tool call")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _Unusable("malformed tool call")
    arguments = _json(function.get("arguments") or {}, "tool call")
    if not isinstance(arguments, Mapping):
        raise _Unusable("malformed tool call")
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    if isinstance(call.get("id"), str):
        made["id"] = call["id"]
    return made


def _tools(tools: Any) -> list[Tool] | None:
    if not tools:
        return None
    tools = _json(tools, "tools")
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
        raise _Unusable("malformed tools")
    made: list[Tool] = [dict(t) if isinstance(t.get("function"), Mapping) else {"type": "function", "function": dict(t)} for t in tools]
    if not all(isinstance(t["function"].get("name"), str) for t in made):
        raise _Unusable("malformed tools")
    return made or None


def _json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise _Unusable(f"malformed {what}") from None


def _check_turns(messages: list[Message], *, empty_answers: bool) -> None:
    asked = False
    for message in messages:
        role, empty = message["role"], not message["content"].strip()
        if role == "assistant":
            if not asked:
                raise _Unusable("an answer before any user turn")
            empty = empty and not empty_answers and not message.get("tool_calls") and not message.get("reasoning_content")
        asked = asked or role == "user"
        if empty and role != "tool":  # a tool may well return nothing
            raise _Unusable("empty content")
    if not asked:
        raise _Unusable("no user turn")


def _check_unicode(prompt: Prompt) -> None:
    # JSON can spell half of a surrogate pair, which no tokenizer can read.
    try:
        json.dumps([prompt.id, prompt.domain, prompt.messages, prompt.tools], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise _Unusable("invalid Unicode") from None


def _label(row: Mapping[str, Any], column: str, otherwise: str) -> str:
    value = row.get(column)
    return str(value) if isinstance(value, str | int) and str(value).strip() else otherwise
