"""Prompts that the target writes itself: it continues the rendered beginning of a user turn.

The idea is Magpie's (Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing", arXiv:2406.08464). Given the first words of real prompts it writes more of their kind. Generation is done elsewhere; here are
the beginnings and the judgement of what came of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from firesteel.errors import TemplateError
from firesteel.prompts.conversation import Message, Prompt, Tool
from firesteel.prompts.template import SENTINEL, decode_ids, encode_text, render

_SHORTEST = 8  # characters
_LONGEST = 4000
_WINDOW = 5  # words; a text most of whose five-word runs recur is a loop
_DISTINCT = 0.5
_FEWEST, _MOST = 2, 24  # words of an opening


@dataclass(frozen=True)
class Seed:
    """What a synthesised user turn begins with, and what stands before it.

    Attributes:
        opening: its first words; empty where the target begins by itself.
        domain: that it counts under.
        system: turns before it.
        tools: on offer.
    """

    opening: str = ""
    domain: str = "synthesized"
    system: tuple[Message, ...] = ()
    tools: list[Tool] | None = None


UNSEEDED = Seed()


def draw_seed(prompts: Sequence[Prompt], draw: Random) -> Seed:
    """The first words of one of the prompts: every domain is as likely as the others, and up to half of the words as likely as two."""
    domain = draw.choice(sorted({p.domain for p in prompts}))
    prompt = draw.choice([p for p in prompts if p.domain == domain])
    first = next(i for i, m in enumerate(prompt.messages) if m["role"] == "user")
    words = list(re.finditer(r"\S+", str(prompt.messages[first]["content"])))
    count = draw.randint(min(_FEWEST, len(words)), max(_FEWEST, min(_MOST, len(words) // 2)))
    opening = str(prompt.messages[first]["content"])[: words[min(count, len(words)) - 1].end()].lstrip() if words else ""
    return Seed(opening, domain, tuple(m for m in prompt.messages[:first] if m["role"] == "system"), prompt.tools)


def synthesis_prefix(tokenizer: Any, seed: Seed = UNSEEDED) -> list[int]:
    """Token ids up to where a first user turn's text begins, and its opening.

    Raises:
        TemplateError: the template does not show the user's text, or there is no template.
    """
    messages = [*seed.system, {"role": "user", "content": SENTINEL}]
    text = render(tokenizer, messages, seed.tools, generate=False, where="prompts.sources: synthesize")
    before, found, _ = text.partition(SENTINEL)
    if not found:
        raise TemplateError(
            "the chat template does not show a user turn's text as it is: the target cannot continue one",
            mend="give other sources than synthesize, or another template: target.chat_template=FILE",
        )
    return encode_text(tokenizer, before + seed.opening)


def continuation(tokenizer: Any, prefix: Sequence[int], token_ids: Sequence[int]) -> str:
    """What the target wrote behind `prefix`, its end token left out; read together, for some tokenizers drop a space where a text begins."""
    return decode_ids(tokenizer, [*prefix, *token_ids[:-1]])[len(decode_ids(tokenizer, prefix)) :]


def accept_synthesized(text: str, *, number: int, domain: str | None, seed: Seed = UNSEEDED) -> Prompt | str:
    """Judge a user turn that the target wrote (its end token and anything after it cut off).

    Args:
        text: what came behind the seed's opening.
        number: how manieth it is; makes the prompt's id.
        domain: that it is to count under; None: the seed's.

    Returns:
        The prompt, or the reason why it is none.
    """
    if len(text.strip()) < _SHORTEST:
        return "synthesized text too short"
    text = (seed.opening + text).strip()
    if len(text) > _LONGEST:
        return "synthesized text too long"
    if not any(c.isalpha() for c in text) or "\ufffd" in text:
        return "synthesized text is not text"
    words = re.findall(r"\S+", text)
    runs = [tuple(words[i : i + _WINDOW]) for i in range(len(words) - _WINDOW + 1)]
    if runs and len(set(runs)) < _DISTINCT * len(runs):
        return "synthesized text repeats itself"
    name = f"synthesized-{number}"
    return Prompt(name, domain or seed.domain, [*seed.system, {"role": "user", "content": text}], seed.tools, name)
