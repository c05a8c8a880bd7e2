"""What an answer is made of: reasoning, content and tool calls, taken apart as a server does before a client shows it the answer again.

No model is known by name: the chat template is asked how it writes each part. Reasoning stands between the markers that it (or the
tokenizer) has for it; where the generation prompt opens the block already, the answer begins inside. Tool calls are read only in a form
in which the template's own call can be read back. Whatever is not recognised stays content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from firesteel.errors import TemplateError
from firesteel.prompts.conversation import FinishReason, Message, Tool
from firesteel.prompts.template import SENTINEL, AnsweredTurn, answer_text, decode_ids, render

_TAIL = 32  # tokens at a prompt's end that may spell the opening marker
# A closing marker of the family, where a template only mentions it: </think>, [/THINK], </seed:think> ...
_CLOSING = re.compile(r"[<\[◁]/(?:\w+:)?(?:think|thought|reason)\w*[>\]▷]", re.IGNORECASE)
_BLOCK = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.:/-]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

_Call = tuple[str, dict[str, Any]]  # name and arguments
_Reader = Callable[[str, list[Tool]], _Call | None]


class AnswerParts:
    """Takes a target's answers apart.

    Attributes:
        markers: what opens and closes reasoning, None if the target has no such markers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.markers = _shown_markers(tokenizer) or _named_markers(tokenizer)
        self._read = _call_reader(tokenizer)

    def turn(self, prompt_ids: Sequence[int], token_ids: Sequence[int], finish_reason: str, tools: list[Tool] | None = None) -> AnsweredTurn:
        """An answer as later turns show it.

        Args:
            prompt_ids: what it answers; its end tells whether the answer begins inside a block of reasoning.
            token_ids: as generated, with the end token where `finish_reason` is `stop`.
            tools: on offer; without them nothing is taken for a call.
        """
        reason: FinishReason = "stop" if finish_reason == "stop" else "length"
        reasoning, content = self._split(prompt_ids, answer_text(self.tokenizer, token_ids, reason))
        calls, content = self._take_calls(content, tools)
        return AnsweredTurn(list(token_ids), content, reason, reasoning, calls)

    def _split(self, prompt_ids: Sequence[int], text: str) -> tuple[str | None, str]:
        """Reasoning and the rest. A block that is never closed is reasoning to its end; newlines around both are the block's own."""
        if self.markers is None:
            return None, text
        begin, end = self.markers
        if text.lstrip().startswith(begin):
            inside = text.lstrip().removeprefix(begin)
        elif decode_ids(self.tokenizer, prompt_ids[-_TAIL:]).rstrip().endswith(begin):
            inside = text
        else:
            return None, text
        reasoning, _, content = inside.partition(end)
        return reasoning.strip("\n") or None, content.lstrip("\n")

    def _take_calls(self, text: str, tools: list[Tool] | None) -> tuple[list[dict[str, Any]] | None, str]:
        """Calls and what stands before them; all or none: a call that cannot be read, or text behind the calls, leaves everything content."""
        start = text.find("<tool_call>")
        if self._read is None or not tools or start < 0:
            return None, text
        calls: list[dict[str, Any]] = []
        at = start
        while block := _BLOCK.match(text, at):
            call = self._read(block[1], tools)
            if call is None:
                return None, text
            calls.append(_message_call(*call))
            at = block.end()
        if not calls or text[at:].strip():
            return None, text
        return calls, text[:start].rstrip("\n")


def _shown_markers(tokenizer: Any) -> tuple[str, str] | None:
    """Markers that the template itself puts around a turn's `reasoning_content`."""
    thought, said = SENTINEL + "r", SENTINEL + "c"
    answer: Message = {"role": "assistant", "content": said, "reasoning_content": thought}
    text = _try(tokenizer, [{"role": "user", "content": "question"}, answer], None)
    before, found, after = text.partition(thought)
    words = after.partition(said)[0].split() if said in after else []
    if not found or not words:
        return None
    begin, end = words[0].replace("/", "", 1), words[0]
    return (begin, end) if begin != end and before.rstrip().endswith(begin) else None


def _named_markers(tokenizer: Any) -> tuple[str, str] | None:
    """Markers that the template mentions or the tokenizer has as tokens: many templates leave reasoning out of every turn."""
    template = tokenizer.chat_template
    sources = list(template.values()) if isinstance(template, dict) else [template or ""]
    known = "\n".join([*sources, *(str(t.content) for t in tokenizer.added_tokens_decoder.values())])
    for end in _CLOSING.findall(known):
        begin = end.replace("/", "", 1)
        if begin in known:
            return begin, end
    return None


def _call_reader(tokenizer: Any) -> _Reader | None:
    """What reads the template's own way of writing a call."""
    name, key, value = (SENTINEL + suffix for suffix in "nkv")
    parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    tools: list[Tool] = [{"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}]
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [_message_call(name, {key: value})]}
    # The last one: templates show the form at the beginning, too.
    blocks = _BLOCK.findall(_try(tokenizer, [{"role": "user", "content": "question"}, answer], tools))
    readers: tuple[_Reader, ...] = (_json_call, _function_call, _paired_call)
    return next((r for r in readers if blocks and r(blocks[-1], tools) == (name, {key: value})), None)


def _json_call(text: str, tools: list[Tool]) -> _Call | None:
    """`{"name": ..., "arguments": {...}}`: Hermes, Qwen."""
    try:
        said = json.loads(text)
        name, arguments = said["name"], said["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, KeyError, TypeError):
        return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _function_call(text: str, tools: list[Tool]) -> _Call | None:
    """`<function=NAME>` with a `<parameter=KEY>` for each argument: Qwen3-Coder."""
    found = _FUNCTION.fullmatch(text)
    if found is None or _PARAMETER.sub("", found[2]).strip():
        return None
    return found[1], {key: _typed(value, found[1], key, tools) for key, value in _PARAMETER.findall(found[2])}


def _paired_call(text: str, tools: list[Tool]) -> _Call | None:
    """The name, then `<arg_key>` and `<arg_value>` in turn: GLM."""
    found = _NAMED.fullmatch(text)
    if found is None or _PAIR.sub("", found[2]).strip():
        return None
    return found[1], {key.strip(): _typed(value, found[1], key.strip(), tools) for key, value in _PAIR.findall(found[2])}


def _typed(text: str, name: str, key: str, tools: list[Tool]) -> Any:
    """An argument that is written as bare text, in its type: text where the tool's schema says so, else what JSON makes of it."""
    schema = next((t["function"].get("parameters") for t in tools if t["function"].get("name") == name), None)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    about = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(about, dict) and about.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _try(tokenizer: Any, messages: list[Message], tools: list[Tool] | None) -> str:
    """The template's text, empty if it refuses."""
    try:
        return render(tokenizer, messages, tools, generate=False, where="a trial")
    except TemplateError:
        return ""
