"""Training answers may be sampled; what validation replays is greedy all the same."""

from __future__ import annotations

from collections.abc import Callable

from firesteel.stages import prompts, respond
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]


def answered(make_line: MakeLine, name: str, **responses: object) -> Line:
    line = make_line(responses=responses)
    line.recipe.name = name
    prompts.run(line)
    respond.run(line)
    return line


def test_validation_is_greedy_whatever_training_is(make_line: MakeLine) -> None:
    greedy = answered(make_line, "greedy").input("responses")
    validation, train = (respond.read_responses(greedy, split) for split in ("validation", "train"))
    found = answered(make_line, "sampled", temperature=1.0, top_p=0.9, samples=2).input("responses")
    assert respond.read_responses(found, "validation") == validation
    sampled = respond.read_responses(found, "train")
    assert len(sampled) == 2 * len(train)
    assert [a.turns for a in sampled[::2]] != [a.turns for a in train]


def test_greedy_answers_on_file_serve_a_sampled_recipe_for_validation(make_line: MakeLine) -> None:
    greedy = answered(make_line, "greedy").input("responses")
    validation, train = (respond.read_responses(greedy, split) for split in ("validation", "train"))
    line = answered(make_line, "sampled", temperature=1.0, answers=str(greedy / "validation.jsonl"))
    assert f"responses: {len(validation)} of {len(validation) + len(train)} answers are on file" in line.screen.lines
    assert respond.read_responses(line.input("responses"), "validation") == validation
