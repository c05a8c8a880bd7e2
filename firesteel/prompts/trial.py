"""A chat template tried before anything is spent: what it does with a small conversation of two turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from firesteel.errors import TemplateError
from firesteel.prompts.conversation import Message, Prompt
from firesteel.prompts.template import SENTINEL, decode_ids, first_difference, render, special_strings

_ASKED, _SAID, _THOUGHT, _AGAIN = (SENTINEL + suffix for suffix in "qart")
_MEND = "give the template that the target was trained with: target.chat_template=FILE"


def try_template(tokenizer: Any, end_ids: Iterable[int] = ()) -> str | None:
    """See that a template shows answers, ends them, and leaves the turns before them alone.

    Args:
        end_ids: tokens that end the target's texts; all special tokens count as such, too.

    Returns:
        How later turns show earlier answers, if otherwise than they were given: then every answer needs a document of its own.

    Raises:
        TemplateError: it does not, or there is no template.
    """
    question: Message = {"role": "user", "content": _ASKED}
    answer: Message = {"role": "assistant", "content": _SAID}
    start = render(tokenizer, [question], None, generate=True, where="a plain question")
    once = render(tokenizer, [question, answer], None, generate=False, where="a plain answer")
    again: Message = {"role": "user", "content": _AGAIN}
    try:
        twice = render(tokenizer, [question, answer, again], None, generate=True, where="a second question")
    except TemplateError:  # it is for single questions: nothing is shown again
        twice = ""
    _check_end(tokenizer, [twice, once], {decode_ids(tokenizer, [i]) for i in end_ids})
    asked = start.find(_ASKED) + len(_ASKED)
    if _ASKED in start and once[:asked] != start[:asked]:
        raise TemplateError(f"the chat template renders a question otherwise once it is answered: {first_difference(start, once)}", mend=_MEND)
    return _rewriting(tokenizer, question, answer, again, start) if twice else None


def hides_tools(tokenizer: Any, prompt: Prompt) -> bool:
    """Whether a prompt that the template accepts offers tools that it does not show to the target."""
    if not prompt.tools:
        return False
    try:
        shown, bare = (render(tokenizer, prompt.history([]), tools, generate=True, where=prompt.where) for tools in (prompt.tools, None))
    except TemplateError:  # calls without tools are refused: so it looks at them
        return False
    return shown == bare


def _check_end(tokenizer: Any, texts: list[str], ends: set[str]) -> None:
    """In one of the texts an end-of-turn token follows the answer: not all templates end the last turn, and some show the last one only."""
    shown = [text.rpartition(_SAID)[2].partition(_AGAIN)[0] for text in texts if _SAID in text]
    if not shown:
        raise TemplateError("the chat template does not show an answer's text as it is", mend=_MEND)
    known = {end for end in ends | special_strings(tokenizer) if end}
    if not any(end in after for after in shown for end in known):
        raise TemplateError(f"the chat template puts no end-of-turn token after an answer (it puts {shown[0]!r})", mend=_MEND)


def _rewriting(tokenizer: Any, question: Message, answer: Message, again: Message, start: str) -> str | None:
    thinking: Message = {**answer, "reasoning_content": _THOUGHT}
    try:
        once = render(tokenizer, [question, thinking], None, generate=False, where="an answer with reasoning")
        twice = render(tokenizer, [question, thinking, again], None, generate=True, where="a second question")
    except TemplateError:
        return None
    if _THOUGHT in once and _THOUGHT not in twice:
        return "later turns show an earlier answer without its reasoning, so each answer gets a document of its own"
    if not twice.startswith(start):
        return "later turns show an earlier answer otherwise than it began, so each answer gets a document of its own"
    return None
