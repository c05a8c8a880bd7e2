"""Answers on file: what a row holds, and what a work file keeps over a kill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from firesteel.prompts.template import AnsweredTurn
from firesteel.responses.answers import Answered, append_answers, read_answers
from firesteel.responses.generate import Answer, Ask, Sampling
from firesteel.responses.kept import KeptAnswers


def test_a_row_has_parts_only_where_the_answer_has(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    plain, thought = AnsweredTurn([5, 2], "Hi", "stop"), AnsweredTurn([6, 7, 2], "", "stop", "hm", [call])
    rows = [Answered("a", "p", 0, [plain]), Answered("b", "q", 1, [plain, thought], half=True)]
    assert rows[0].to_row() == {"key": "a", "prompt_key": "p", "sample": 0, "turns": [{"token_ids": [5, 2], "text": "Hi", "finish_reason": "stop"}]}
    path = tmp_path / "answers.jsonl"
    append_answers(path, rows)
    assert list(read_answers(path).values()) == rows
    assert read_answers(path)["b"].turns[1].message() == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}


class Counting:
    """Says each prompt's first token again; `asked` has the names."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[str] = []
        self.stop_after = stop_after

    def run(self, asks: Sequence[Ask], sampling: Any, eos_ids: Any, done: Callable[[int, Answer], None]) -> None:
        for i, ask in reversed(list(enumerate(asks))):
            if len(self.asked) == self.stop_after:
                raise RuntimeError("power cut")
            self.asked.append(ask.name)
            done(i, Answer([ask.token_ids[0], 2], "stop"))


def test_a_work_file_keeps_each_answer(tmp_path: Path) -> None:
    path, asks, sampling = tmp_path / "work.jsonl", [Ask(f"a{i}", [i + 10, 1]) for i in range(6)], Sampling(4)
    wanted = [Answer([i + 10, 2], "stop") for i in range(6)]

    def kept(generator: Counting, *, target: str = "t", sampling: Sampling = sampling, asks: list[Ask] = asks) -> list[Answer]:
        return KeptAnswers(path, target).answers(generator, asks, sampling, (2,))  # type: ignore[arg-type]

    cut = Counting(stop_after=4)
    try:
        kept(cut)
    except RuntimeError:
        with path.open("a") as file:
            file.write('{"key": "torn')
    again = Counting()
    assert kept(again) == wanted
    assert sorted(cut.asked + again.asked) == [a.name for a in asks]
    nothing = Counting()
    assert kept(nothing) == wanted
    assert nothing.asked == []
    for other in ({"target": "u"}, {"sampling": Sampling(5)}, {"asks": [Ask(a.name, [*a.token_ids, 0]) for a in asks]}):
        anew = Counting()
        assert kept(anew, **other) == wanted  # type: ignore[arg-type]
        assert len(anew.asked) == 6
