"""Of what the target said, later turns show what a server would: reasoning and tool calls apart, as the template renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from templated_target import END, save_templated_target

from firesteel.decoding.decode import Decoded
from firesteel.prompts.conversation import Prompt
from firesteel.responses.generate import Answer, Ask
from firesteel.stages import evaluate, extract, prompts, respond
from firesteel.stages.line import Line

from prompt_templates import CHATML, QWEN3, THINKER  # isort: skip - templated_target makes it known

MakeLine = Callable[..., Line]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
WRITTEN = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ready(make_line: MakeLine, folder: Path, template: str, tools: Any = None) -> Line:
    """A line behind its prompts, all of two turns."""
    save_templated_target(folder / "target", template)
    sources = []
    for split, count in (("train", 8), ("eval", 3)):
        rows = [{"messages": [user(f"{split} question {i * i}?"), user(f"And {i}?")], "tools": tools} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        sources.append({"path": str(folder / f"{split}.jsonl"), "split": split})
    line = make_line(target={"model": str(folder / "target")}, prompts={"sources": sources, "max_tokens": 200}, hidden={"max_length": 250})
    prompts.run(line)
    return line


class Scripted:
    """A generator that says the same to everybody, and keeps what it was asked."""

    half = False
    asked: list[Ask]

    def __init__(self, line: Line, text: str) -> None:
        self.ids = line.target.tokenizer(text, add_special_tokens=False)["input_ids"] + [END]
        self.asked = []

    def __call__(self, *_: Any) -> Scripted:
        return self

    def run(self, asks: Sequence[Ask], sampling: Any, eos_ids: Any, done: Callable[[int, Answer], None]) -> None:
        self.asked += asks
        for i in range(len(asks)):
            done(i, Answer(list(self.ids), "stop"))


def rendered(line: Line, prompt: Prompt, answer: dict[str, Any]) -> list[int]:
    """The second turn's prompt, by Transformers alone."""
    messages = [prompt.messages[0], {"role": "assistant", **answer}, prompt.messages[1]]
    text = line.target.tokenizer.apply_chat_template(messages, tools=prompt.tools, add_generation_prompt=True, tokenize=False)
    return line.target.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("template", "said", "tools", "answer", "documents"),
    [
        (THINKER, "hm\n</think>\n\nHello", None, {"content": "Hello", "reasoning_content": "hm"}, 1),
        (QWEN3, "<think>\nhm\n</think>\n\nHello", None, {"content": "Hello", "reasoning_content": "hm"}, 2),
        (CHATML, f"<think>\nhm\n</think>\n\n{WRITTEN}", TOOLS, {"content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]}, 1),
        (CHATML, WRITTEN, None, {"content": WRITTEN}, 1),
    ],
    ids=["opened-by-the-prompt", "history-without-reasoning", "calls", "no-tools-on-offer"],
)
def test_the_second_turns_prompt_is_what_the_template_renders(
    make_line: MakeLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str, tools: Any, answer: dict[str, Any], documents: int
) -> None:
    line = ready(make_line, tmp_path, template, tools)
    script = Scripted(line, said)
    monkeypatch.setattr(respond, "Generator", script)
    found = respond.run(line)
    for split in respond.SPLITS:
        given = {p.key: p for p in prompts.read_prompts(line.input("prompts"), split)}
        answers = respond.read_responses(found, split)
        for answered in answers:
            second = next(a for a in script.asked if a.name == f"{answered.key}/1")
            assert second.token_ids == rendered(line, given[answered.prompt_key], answer)
            for turn in answered.turns:
                assert turn.message() == {"role": "assistant", **answer}
        assert len(extract.documents_of(line, split)) == documents * len(answers)
    if template == QWEN3:
        said_once = [text for text in line.screen.lines if "without its reasoning" in text]
        assert said_once == [text for text in line.screen.lines if "11 x in the chat template later turns show" in text]
        assert len(said_once) == 1


def test_measurement_shows_answers_as_training_does(make_line: MakeLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ready(make_line, tmp_path, THINKER)
    script, asked = Scripted(line, "hm\n</think>\n\nHello"), []

    def decode(self: Any, runtime: Any, prompt_ids: list[int], *_: Any) -> Decoded:
        asked.append(prompt_ids)
        return Decoded(tokens=list(script.ids), finish_reason="stop")

    monkeypatch.setattr(evaluate._Evaluation, "_speculative", decode)
    held_out = prompts.read_prompts(line.input("prompts"), "eval")
    measured = evaluate._Evaluation(line, SimpleNamespace(path=tmp_path))._answers(SimpleNamespace(num_drafts=3), "dspark", held_out, 0.0, "")  # type: ignore[arg-type]
    assert len(measured) == 2 * len(held_out)
    assert asked[1::2] == [rendered(line, p, {"content": "Hello", "reasoning_content": "hm"}) for p in held_out]
