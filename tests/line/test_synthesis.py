"""Prompts that the target writes by itself, and as others begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from firesteel.errors import RecipeError
from firesteel.responses import kept
from firesteel.stages import prompts
from firesteel.stages.line import Line


def sources(folder: Path, **synthesized: object) -> dict[str, object]:
    given = [{"path": str(folder / "train.jsonl")}, {"path": str(folder / "eval.jsonl"), "split": "eval"}]
    return {"sources": [*given, {"synthesize": 6, **synthesized}]}


def test_more_prompts_of_a_kind(base_folder: Path, make_line: Callable[..., Line]) -> None:
    line = make_line(prompts=sources(base_folder, like=["odd"]))
    found = prompts.run(line)
    rows = [p for split in ("train", "validation") for p in prompts.read_prompts(found, split)]
    made = [p for p in rows if p.source.startswith("synthesized-")]
    assert 0 < len(made) <= 6
    given = [r["messages"][0]["content"] for r in map(json.loads, (base_folder / "train.jsonl").read_text().splitlines()) if r["domain"] == "odd"]
    for prompt in made:
        assert prompt.domain == "odd"
        made_text = prompt.messages[0]["content"]
        assert any(made_text.startswith(" ".join(text.split()[:2])) and made_text != text for text in given)
        assert "<" not in made_text, "special tokens make no prompt"


def test_without_a_kind_the_target_begins_itself(base_folder: Path, make_line: Callable[..., Line]) -> None:
    found = prompts.run(make_line(prompts=sources(base_folder)))
    assert any(p.domain == "synthesized" for split in ("train", "validation") for p in prompts.read_prompts(found, split))


@pytest.mark.parametrize("like", [[], ["odd"]])
def test_what_was_written_before_a_kill_is_kept(base_folder: Path, make_line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, like: list[str]) -> None:
    whole = prompts.run(make_line(prompts=sources(base_folder, like=like)))
    broken = make_line(prompts=sources(base_folder, like=like))
    broken.recipe.name = "broken"
    real, written = kept.KeptAnswers._append, []

    def append(self: kept.KeptAnswers, key: str, answer: object) -> None:
        if len(written) == 5:
            raise RuntimeError("power cut")
        real(self, key, answer)  # type: ignore[arg-type]
        written.append(key)

    monkeypatch.setattr(kept.KeptAnswers, "_append", append)
    with pytest.raises(RuntimeError, match="power cut"):
        prompts.run(broken)
    monkeypatch.undo()
    again: list[str] = []
    monkeypatch.setattr(kept.KeptAnswers, "_append", lambda self, key, answer: (again.append(key), real(self, key, answer)))
    found = prompts.run(broken)
    assert len(set(written) | set(again)) == len(written) + len(again), "nothing is written twice"
    for split in prompts.SPLITS:
        assert (found / f"{split}.jsonl").read_text() == (whole / f"{split}.jsonl").read_text()
    assert found.manifest.about["dropped"] == whole.manifest.about["dropped"]
    assert not (found / "synthesized.jsonl").exists(), "it was needed to resume only"


def test_a_kind_that_nobody_gave(base_folder: Path, make_line: Callable[..., Line]) -> None:
    line = make_line(prompts=sources(base_folder, like=["odd", "law"]))
    with pytest.raises(RecipeError, match=r"sources\[2\]\.like names 'law'.*\n.*domains there: even, odd"):
        prompts.run(line)


def test_a_kind_without_synthesis(base_folder: Path, make_line: Callable[..., Line]) -> None:
    line = make_line(prompts={"sources": [{"path": str(base_folder / "train.jsonl"), "like": ["odd"]}]})
    with pytest.raises(RecipeError, match=r"sources\[0\]\.like is set, but this source synthesizes nothing"):
        prompts.run(line)
