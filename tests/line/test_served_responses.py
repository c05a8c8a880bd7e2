"""The stage `responses` with servers: the same answers as in this process, through failures and interruptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai_fake import OpenAiFake

from firesteel.errors import RecipeError, TargetError
from firesteel.stages import prompts, respond
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]


def served(make_line: MakeLine, name: str, urls: list[str], **more: Any) -> Line:
    servers = {"urls": urls, "backoff": 0.01, "backoff_max": 0.02, "outage": 1.5, "retries": 20, "timeout": 5.0, **more}
    line = make_line(responses={"engine": "endpoints", "servers": servers})
    line.recipe.name = name
    prompts.run(line)
    return line


def test_servers_answer_like_this_process_turn_by_turn(make_line: MakeLine) -> None:
    local = make_line()
    prompts.run(local)
    wanted = respond.run(local)
    with OpenAiFake(local, fail_every=5) as one, OpenAiFake(local) as two:
        line = served(make_line, "served", [one.url, two.url + "/"])
        found = respond.run(line)
        assert min(one.answered, two.answered) > 0
        for split in respond.SPLITS:
            assert (found / f"{split}.jsonl").read_text() == (wanted / f"{split}.jsonl").read_text()
            assert found.manifest.about[split]["finish_reasons"] == wanted.manifest.about[split]["finish_reasons"]
        assert any(len(a.turns) == 2 for a in respond.read_responses(found, "train"))
        asked = one.asked + two.asked
        respond.run(line)
        assert one.asked + two.asked == asked, "answered once is enough"


def test_an_interrupted_run_keeps_its_answers(make_line: MakeLine) -> None:
    local = make_line()
    with OpenAiFake(local, stop_after=20) as fake:
        line = served(make_line, "broken", [fake.url])
        with pytest.raises(TargetError, match="out of order"):
            respond.run(line)
        fake.stop_after = None
        kept = fake.answered
        respond.run(line)
        turns = sum(len(a.turns) for split in respond.SPLITS for a in respond.read_responses(line.input("responses"), split))
        assert kept == 20
        # Of a conversation that was under way all turns are asked for again.
        assert turns <= fake.answered < turns + 20


def test_nobody_to_ask_is_said(make_line: MakeLine) -> None:
    with pytest.raises(RecipeError, match=r"responses\.servers\.urls"):
        respond.run(served(make_line, "nobody", []))
