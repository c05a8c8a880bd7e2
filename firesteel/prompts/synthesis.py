"""Prompts that the target writes itself: it continues the rendered beginning of a user turn.

The idea is Magpie's (Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing", arXiv:2406.08464). Generation is done elsewhere; here are its beginning and the judgement of its result.
"""

from __future__ import annotations

import re
from typing import Any

from firesteel.errors import TemplateError
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.template import SENTINEL, encode_text, render

_SHORTEST = 8  # characters
_LONGEST = 4000
_WINDOW = 5  # words; a text most of whose five-word runs recur is a loop
_DISTINCT = 0.5


def synthesis_prefix(tokenizer: Any) -> list[int]:
    """Token ids up to where a first user turn's text begins.

    Raises:
        TemplateError: the template does not show the user's text, or there is no template.
    """
    text = render(tokenizer, [{"role": "user", "content": SENTINEL}], None, generate=False, where="prompts.sources: synthesize")
    before, found, _ = text.partition(SENTINEL)
    if not found:
        raise TemplateError(
            "the chat template does not show a user turn's text as it is: the target cannot continue one",
            mend="give other sources than synthesize, or another template: target.chat_template=FILE",
        )
    return encode_text(tokenizer, before)


def accept_synthesized(text: str, *, number: int, domain: str) -> Prompt | str:
    """Judge a user turn that the target wrote (its end token and anything after it cut off).

    Args:
        number: how manieth it is; makes the prompt's id.

    Returns:
        The prompt, or the reason why it is none.
    """
    text = text.strip()
    if len(text) < _SHORTEST:
        return "synthesized text too short"
    if len(text) > _LONGEST:
        return "synthesized text too long"
    if not any(c.isalpha() for c in text) or "\ufffd" in text:
        return "synthesized text is not text"
    words = re.findall(r"\S+", text)
    runs = [tuple(words[i : i + _WINDOW]) for i in range(len(words) - _WINDOW + 1)]
    if runs and len(set(runs)) < _DISTINCT * len(runs):
        return "synthesized text repeats itself"
    name = f"synthesized-{number}"
    return Prompt(name, domain, [{"role": "user", "content": text}], None, name)
