"""Chat template -> token ids and loss mask, derived from rendering, never from patterns of role markers.

For each answer the conversation before it is rendered with the generation prompt (what the target is given) and
the conversation through it without (what comes of it). The first must begin the second; the rest, up to and with
the token that ends the turn, is what the target must emit, and that is what is supervised. The template is asked
with a sentinel what it puts after an answer's text.

Several turns share a document only where the tokens of the later prompt begin with the tokens of the earlier prompt
and its answer. Where a template rewrites history (Qwen3 drops old reasoning, for one), or where the answer's text
tokenises otherwise than it was generated, each answer gets a document of its own: so every supervised token stands
after exactly the tokens that the target sees when it generates it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from firesteel.artifact import hash_json
from firesteel.errors import DataError, TemplateError
from firesteel.prompts.conversation import Conversation, FinishReason, Message, Prompt, Tool
from firesteel.prompts.dropped import Dropped

SENTINEL = "Xq7sentinelZk3"  # letters and digits only: no template trims or escapes it
_OTHER_TEMPLATE = "give another template with target.chat_template=FILE, or let the target answer itself (the stage `respond` needs no alignment)"


@dataclass(frozen=True)
class AnsweredTurn:
    """What the target said in one turn.

    Attributes:
        token_ids: generated ids, the end-of-turn token included if `finish_reason` is `stop`.
        text: what later turns show of it (`content`).
        finish_reason: `stop` or `length`.
        reasoning_content: reasoning that was taken apart from `text`, or None.
        tool_calls: calls that were taken apart from `text`, or None.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def message(self) -> Message:
        """The turn as later turns' templates see it."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True)
class Document:
    """Token ids to train on.

    Attributes:
        token_ids: T ids.
        loss_mask: T booleans, True where the token is supervised (the target emits it).
        prompt_key: key of the prompt or conversation it comes from.
        turns: which answers are supervised in it, counted from 0.
        finish_reasons: of those answers.
        domain: kind of prompt.
        source: where the row came from.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    prompt_key: str
    turns: tuple[int, ...]
    finish_reasons: tuple[FinishReason, ...]
    domain: str
    source: str

    @property
    def key(self) -> str:
        """Hash of ids and mask; names the document in stores."""
        return hash_json([self.token_ids, [int(m) for m in self.loss_mask]])


@dataclass(frozen=True)
class TemplateFacts:
    """What a chat template does.

    Attributes:
        system: it accepts a system turn.
        tools: it shows the tools to the target.
        end: the token that ends an answer, None if the template ends none.
    """

    system: bool
    tools: bool
    end: str | None


@dataclass(frozen=True)
class _Closing:
    """What a template puts after an answer's text: `lead` and `end` are emitted by the target, `tail` is not."""

    lead: str
    end: str
    tail: str


@dataclass(frozen=True)
class _Answer:
    turn: int
    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: FinishReason


def render(
    tokenizer: Any, messages: Sequence[Message], tools: list[Tool] | None, *, generate: bool, where: str, options: Mapping[str, Any] | None = None
) -> str:
    """The chat template's text.

    Args:
        generate: add the generation prompt (what precedes an answer).
        options: further variables of the template.
        where: the row, for errors.

    Raises:
        TemplateError: there is no template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            f"{where} cannot be rendered: the target's tokenizer has no chat template", mend="give one with target.chat_template=FILE (a Jinja template)"
        )
    try:
        return tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=generate, tokenize=False, **(options or {}))
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as e:
        roles = ", ".join(m["role"] for m in messages)
        raise TemplateError(
            f"the chat template refuses {where} (turns: {roles}): {e or type(e).__name__}",
            mend="change or leave out the row, or give another template with target.chat_template=FILE",
        ) from None


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of rendered text; special tokens written in it count, none are added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of ids, special tokens shown, nothing cleaned up."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def answer_text(tokenizer: Any, token_ids: Sequence[int], finish_reason: str) -> str:
    """Text of a generated answer, without the token that ended it."""
    return decode_ids(tokenizer, token_ids[:-1] if finish_reason == "stop" else token_ids)


def encode_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Tool] | None = None,
    *,
    where: str = "the prompt",
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids that the target is given to answer `messages`: rendered with the generation prompt, and with `options` as variables of the template.

    Raises:
        TemplateError: there is no template, or it refuses the messages (the row is named).
    """
    return encode_text(tokenizer, render(tokenizer, messages, tools, generate=True, where=where, options=options))


def build_document(tokenizer: Any, prompt: Prompt, turns: Sequence[AnsweredTurn]) -> list[Document]:
    """A prompt answered by the target, as documents: prompts by rendering, answers exactly as generated.

    Args:
        turns: answers to the first `len(turns)` slots of the prompt.

    Returns:
        One document, or several where a later turn does not show the earlier ones as they were (see the module's head).

    Raises:
        TemplateError: the template refuses the messages.
    """
    messages: list[Message] = []
    answers = []
    for i, turn in enumerate(turns):
        ids = encode_prompt(tokenizer, prompt.history(messages), prompt.tools, where=prompt.where)
        answers.append(_Answer(i, ids, list(turn.token_ids), turn.finish_reason))
        messages.append(turn.message())
    return _assemble(answers, prompt.key, prompt.domain, prompt.source)


def render_conversation(tokenizer: Any, conversation: Conversation) -> list[Document]:
    """A conversation given as text (off-policy), as documents.

    Every assistant turn whose finish reason is not `given` is supervised: reasoning, content, tool calls and the
    token that ends the turn, unless the turn was cut (`length`).

    Raises:
        TemplateError: the template refuses a turn or cannot be aligned with it (row and turn are named).
    """
    answers = []
    positions = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    for turn, (at, reason) in enumerate(zip(positions, conversation.finish_reasons, strict=True)):
        if reason != "given":
            answers.append(_align(tokenizer, conversation, turn, at, reason))
    return _assemble(answers, conversation.key, conversation.domain, conversation.source)


def prompt_tokens(tokenizer: Any, prompt: Prompt) -> int:
    """Tokens of a prompt: rendered up to the first answer, plus the bare text of later turns.

    Raises:
        TemplateError: the template refuses it.
    """
    first = encode_prompt(tokenizer, prompt.history([]), prompt.tools, where=prompt.where)
    return len(first) + sum(len(encode_text(tokenizer, m["content"])) for m in prompt.messages[prompt.slots[0] :])


def keep_fitting(tokenizer: Any, prompts: Iterable[Prompt], max_tokens: int, dropped: Dropped) -> list[Prompt]:
    """Prompts that the template accepts and that are not too long; the others are counted in `dropped`.

    Raises:
        TemplateError: there is no template at all.
    """
    render(tokenizer, [{"role": "user", "content": SENTINEL}], None, generate=True, where="a plain question")
    kept = []
    for prompt in prompts:
        try:
            length = prompt_tokens(tokenizer, prompt)
        except TemplateError as e:
            dropped.add("refused by the chat template: " + e.message.rsplit("): ", 1)[-1], prompt.where)
            continue
        if length > max_tokens:
            dropped.add(f"longer than prompts.max_tokens={max_tokens}", prompt.where)
        else:
            kept.append(prompt)
    return kept


def template_facts(tokenizer: Any) -> TemplateFacts:
    """Try the template on small conversations.

    Raises:
        TemplateError: there is no template, or it refuses even a plain question.
    """
    question: Message = {"role": "user", "content": "question"}
    render(tokenizer, [question], None, generate=True, where="a plain question")
    tool: Tool = {"type": "function", "function": {"name": SENTINEL, "description": "", "parameters": {"type": "object", "properties": {}}}}
    try:
        end: str | None = _closing(tokenizer, [question], {"role": "assistant", "content": ""}, None, "a plain answer").end
    except TemplateError:
        end = None
    return TemplateFacts(
        system=_shows(tokenizer, [{"role": "system", "content": SENTINEL}, question], None), tools=_shows(tokenizer, [question], [tool]), end=end
    )


def supervised_tokens(documents: Iterable[Document]) -> dict[str, int]:
    """Supervised tokens per domain.

    Raises:
        DataError: there is none at all, so that nothing could be learned.
    """
    counts: dict[str, int] = {}
    for document in documents:
        counts[document.domain] = counts.get(document.domain, 0) + sum(document.loss_mask)
    if not any(counts.values()):
        raise DataError(
            "no document has a supervised token: the drafter could learn nothing", mend="check that the answers are not empty: firesteel respond RECIPE"
        )
    return counts


def supervised_by_source(documents: Iterable[Document]) -> dict[str, int]:
    """Supervised tokens per file that the rows come from (a source without the number of its row)."""
    counts: dict[str, int] = {}
    for document in documents:
        name = re.sub(r"[:-]\d+$", "", document.source) or "unnamed"
        counts[name] = counts.get(name, 0) + sum(document.loss_mask)
    return counts


def special_strings(tokenizer: Any) -> set[str]:
    """Special tokens as text."""
    added = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    return {s for s in added | set(tokenizer.all_special_tokens) if s}


def first_difference(wanted: str, found: str) -> str:
    """Where two texts part, in words."""
    at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), min(len(wanted), len(found)))
    return f"{wanted[at : at + 30]!r} became {found[at : at + 30]!r} at character {at}"


def _align(tokenizer: Any, conversation: Conversation, turn: int, at: int, reason: FinishReason) -> _Answer:
    where = f"{conversation.where}, turn {turn + 1}"
    before, message, tools = conversation.messages[:at], conversation.messages[at], conversation.tools
    start = render(tokenizer, before, tools, generate=True, where=where)
    through = render(tokenizer, [*before, message], tools, generate=False, where=where)
    if not through.startswith(start):
        raise TemplateError(
            f"{where}: the chat template renders the conversation otherwise with the answer than before it: {first_difference(start, through)}",
            mend="where the generation prompt opens a reasoning block, the row needs `reasoning_content`; otherwise " + _OTHER_TEMPLATE,
        )
    closing = _closing(tokenizer, before, message, tools, where)
    emitted = through[len(start) :].removesuffix(closing.tail)
    ending = next((e for e in sorted(special_strings(tokenizer), key=len, reverse=True) if emitted.endswith(e)), None)
    if ending is None:
        raise TemplateError(f"{where}: the chat template ends this answer with {emitted[-20:]!r}, not with an end-of-turn token", mend=_OTHER_TEMPLATE)
    if reason == "length":
        whole = closing.lead + closing.end
        emitted = emitted.removesuffix(whole if emitted.endswith(whole) else ending)
    prompt_ids = encode_text(tokenizer, start)
    return _Answer(turn, prompt_ids, _answer_ids(tokenizer, start, prompt_ids, emitted, where), reason)


def _closing(tokenizer: Any, before: Sequence[Message], message: Message, tools: list[Tool] | None, where: str) -> _Closing:
    """Render the turn with a sentinel for its text, and read what follows it."""
    probe = {k: v for k, v in message.items() if k != "tool_calls"} | {"content": SENTINEL}
    text = render(tokenizer, [*before, probe], tools, generate=False, where=where)
    # The last occurrence: the answer is the last turn, and a row may hold the sentinel itself.
    _, found, after = text.rpartition(SENTINEL)
    if not found:
        raise TemplateError(f"{where}: the chat template does not show the answer's text as it is", mend=_OTHER_TEMPLATE)
    ends = [(after.index(s), -len(s), s) for s in special_strings(tokenizer) if s in after]
    if not ends:
        raise TemplateError(f"{where}: the chat template puts no end-of-turn token after an answer (it puts {after!r})", mend=_OTHER_TEMPLATE)
    at, _, end = min(ends)
    return _Closing(after[:at], end, after[at + len(end) :])


def _answer_ids(tokenizer: Any, start: str, prompt_ids: list[int], emitted: str, where: str) -> list[int]:
    """Ids of what the target emits after `prompt_ids`."""
    whole = encode_text(tokenizer, start + emitted)
    if whole[: len(prompt_ids)] == prompt_ids:
        return whole[len(prompt_ids) :]
    # A token straddles the border (a newline that joins the generation prompt's own). The target cannot emit half
    # of one: it is given the prompt's tokens and emits the rest anew.
    alone = encode_text(tokenizer, emitted)
    if decode_ids(tokenizer, prompt_ids + alone) != decode_ids(tokenizer, whole):
        raise TemplateError(f"{where}: the tokens of the prompt do not begin the tokens of the conversation", mend=_OTHER_TEMPLATE)
    return alone


def _assemble(answers: Sequence[_Answer], key: str, domain: str, source: str) -> list[Document]:
    """Put answers into as few documents as exact prefixes allow; answers without tokens are context only."""
    documents: list[Document] = []
    for answer in answers:
        last = documents[-1] if documents else None
        if last is not None and answer.prompt_ids[: len(last.token_ids)] == last.token_ids:
            documents.pop()
            ids, mask, turns, reasons = last.token_ids, last.loss_mask, last.turns, last.finish_reasons
        else:
            ids, mask, turns, reasons = [], [], (), ()
        gap = answer.prompt_ids[len(ids) :]
        documents.append(
            Document(
                token_ids=ids + gap + answer.answer_ids,
                loss_mask=mask + [False] * len(gap) + [True] * len(answer.answer_ids),
                prompt_key=key,
                turns=(*turns, answer.turn),
                finish_reasons=(*reasons, answer.finish_reason),
                domain=domain,
                source=source,
            )
        )
    return [d for d in documents if any(d.loss_mask)]


def _shows(tokenizer: Any, messages: list[Message], tools: list[Tool] | None) -> bool:
    try:
        return SENTINEL in render(tokenizer, messages, tools, generate=True, where="a trial")
    except TemplateError:
        return False
