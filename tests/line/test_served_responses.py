"""The stage `responses` with servers: the same answers as in this process, through failures and interruptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai_fake import OpenAiFake

from firesteel.errors import DataError, RecipeError, TargetError
from firesteel.stages import extract, prompts, respond
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]


def served(make_line: MakeLine, name: str, urls: list[str], **sampling: Any) -> Line:
    servers = {"urls": urls, "backoff": 0.01, "backoff_max": 0.02, "outage": 6.0, "retries": 20, "timeout": 5.0}
    line = make_line(responses={"engine": "endpoints", "servers": servers, **sampling})
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


def test_validation_is_asked_for_greedily_where_training_is_sampled(make_line: MakeLine) -> None:
    local = make_line()
    with OpenAiFake(local) as fake:
        found = respond.run(served(make_line, "sampled", [fake.url], temperature=0.8, top_p=0.9, samples=2))
        turns = {split: sum(len(a.turns) for a in respond.read_responses(found, split)) for split in respond.SPLITS}
        greedy = [b for b in fake.bodies if b["temperature"] == 0]
        assert len(greedy) == turns["validation"]
        assert all(b["top_p"] == 1 and "seed" not in b for b in greedy)
        assert [b["temperature"] for b in fake.bodies if b["temperature"] > 0] == [0.8] * turns["train"]


def test_prompts_that_the_servers_refuse_are_dropped_and_counted(make_line: MakeLine) -> None:
    """Here the second turns, which hold the first ones, are too long; all others are answered."""
    local = make_line()
    prompts.run(local)
    wanted = respond.run(local)
    with OpenAiFake(local, longest=14) as fake:
        line = served(make_line, "short", [fake.url])
        found = respond.run(line)
    for split in respond.SPLITS:
        assert respond.read_responses(found, split) == [a for a in respond.read_responses(wanted, split) if len(a.turns) == 1]
    long = [p for split in respond.SPLITS for p in prompts.read_prompts(line.input("prompts"), split) if len(p.slots) > 1]
    dropped = found.manifest.about["dropped"]["refused by the servers"]
    assert dropped["count"] == len(long) > 0
    where, said = dropped["first"].split(": ", 1)
    assert where in {p.where for p in long}
    assert "refuses: 400 This model's maximum context length is 14 tokens" in said
    assert any(text.startswith("warning: responses: dropped: ") and "--max-model-len" in text for text in line.screen.lines)
    extract.run(line)


def test_servers_that_refuse_everything_are_quoted(make_line: MakeLine) -> None:
    local = make_line()
    with OpenAiFake(local, longest=1) as fake:
        line = served(make_line, "refused", [fake.url])
        with pytest.raises(DataError, match=r"no prompt of split train is answered.*jsonl:\d+: http.*maximum context length is 1 (.|\n)*prompts\.max_tokens"):
            respond.run(line)


def test_the_server_that_captures_is_asked_where_none_is_named(make_line: MakeLine) -> None:
    """With target.engine=vllm: where `firesteel extract-server` listens, as for hidden states."""
    with OpenAiFake(make_line()) as fake:
        line = served(make_line, "captured", [])
        line.recipe.target.engine, line.recipe.target.vllm.port = "vllm", int(fake.url.rsplit(":", 1)[1])
        respond.run(line)
        assert fake.answered > 0


def test_nobody_to_ask_is_said(make_line: MakeLine) -> None:
    with pytest.raises(RecipeError, match=r"responses\.servers\.urls"):
        respond.run(served(make_line, "nobody", []))
