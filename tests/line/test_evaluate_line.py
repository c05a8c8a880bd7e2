"""Evaluation on a tiny run: whose answer is whose, what a kill leaves, prompts that do not fit, and what the report says of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from line_screen import QuietScreen
from tiny_target import recipe_settings, write_prompts

from firesteel.cli.runner import LINE, run_line
from firesteel.errors import DataError
from firesteel.evaluation.report import read_report
from firesteel.prompts.conversation import Prompt
from firesteel.recipe import recipe_from_dict
from firesteel.stages import check, evaluate, serve
from firesteel.stages.line import Line
from firesteel.stages.prompts import read_prompts

MakeLine = Callable[..., Line]


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> MakeLine:
    """A packaged run whose held-out prompts come from two files with the same ids; keyword arguments are settings of `evaluate`."""
    folder = tmp_path_factory.mktemp("evaluated")
    sources: list[dict[str, object]] = [{"path": str(base_folder / "train.jsonl")}]
    for name, start in (("one", 100), ("two", 200)):
        file = write_prompts(folder / f"{name}.jsonl", 4, start=start)
        rows = [json.loads(text) for text in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({**row, "id": f"x{i}", "domain": "shared"}) + "\n" for i, row in enumerate(rows)))
        sources.append({"path": str(file), "split": "eval"})

    def make(**own: object) -> Line:
        settings = recipe_settings(base_folder, prompts={"sources": sources}, evaluate={"speed_prompts": 0, "prompts_per_domain": None, **own})
        return Line(recipe_from_dict({**settings, "runs_dir": str(folder / "runs")}), QuietScreen())

    line = make()
    for _, stage in LINE[:-1]:
        stage(line)
    return make


def held_out(line: Line) -> list[Prompt]:
    return read_prompts(line.input("prompts"), "eval")


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "requests.jsonl").read_text().splitlines()]


def report(line: Line) -> dict[str, Any]:
    return read_report(evaluate.run(line) / "report.json")


def test_a_killed_evaluation_goes_on_with_every_prompts_own_answer(packaged: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it wrote a line; prompts of other files have the same ids as those that were answered."""
    line = packaged(max_new_tokens=9)
    prompts = held_out(line)
    due = sum(len(p.slots) for p in prompts)
    assert len({p.id for p in prompts}) < len(prompts)
    real, calls = evaluate.decode_speculative, []

    def failing(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("power cut")
        return real(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "decode_speculative", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            evaluate.run(line)
    partial = line.folder / "evaluate.partial"
    assert len(records(partial)) == 3
    with (partial / "requests.jsonl").open("a") as file:
        file.write('{"step": 0, "part": "", "rec')
    resumed = records(evaluate.run(line).path)
    assert len({r["record"]["prompt_key"] for r in resumed}) == len(resumed) == due
    shutil.rmtree(line.folder / "evaluate")
    assert sorted(map(json.dumps, resumed)) == sorted(map(json.dumps, records(evaluate.run(line).path)))


def test_the_servers_check_knows_every_prompts_own_answer(packaged: MakeLine) -> None:
    line = packaged()
    evaluate.run(line)
    found = serve._evaluated(line.folder / "package")
    assert found is not None
    pairs, longest = found
    assert longest == 10
    assert [p.key for p, _ in pairs] == [r.prompt_key for _, r in pairs] == [p.key for p in held_out(line)]


def test_extra_prompts_that_do_not_fit_are_counted_and_a_changed_file_is_measured_anew(packaged: MakeLine, tmp_path: Path) -> None:
    file = tmp_path / "more.jsonl"
    long, turns = " ".join(f"w{i % 80}" for i in range(300)), [" ".join(f"w{(i * j) % 80}" for j in range(14)) for i in range(16)]
    rows: list[dict[str, object]] = [{"prompt": "w3 w14 w15"}, {"prompt": long}, {"turns": turns}, {"nonsense": 1}]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))

    def made() -> Line:
        return packaged(extra=[{"name": "more", "path": str(file)}])

    line = made()
    found = report(line)
    asked = found["extra"]["more"]["requests"]
    assert 1 < asked < 17, "the short one, and turns of the conversation until it is too long"
    dropped = line.input("evaluate").manifest.about["dropped"]
    (reason,) = [why for why in dropped if "longer than 256 positions" in why]
    assert dropped[reason] == {"count": 2, "first": "more.jsonl:2"}
    assert sum(d["count"] for d in dropped.values()) == 3
    assert any(f"Left out: 2 x {reason}" in note for note in found["notes"])
    assert any(f"evaluate: left out: 2 x {reason}" in text for text in line.screen.lines)  # type: ignore[attr-defined]

    again = made()
    evaluate.run(again)
    assert "evaluate: up to date" in again.screen.lines  # type: ignore[attr-defined]
    with file.open("a") as f:
        f.write(json.dumps({"prompt": "w5 w6 w60"}) + "\n")
    assert report(made())["extra"]["more"]["requests"] == asked + 1


@pytest.mark.parametrize("verb", [check.run, run_line])
@pytest.mark.parametrize("place", ["nowhere.jsonl", "."])
def test_an_extra_set_without_a_file_is_found_before_anything_is_made(make_line: MakeLine, tmp_path: Path, verb: Callable[[Line], None], place: str) -> None:
    line = make_line(evaluate={"extra": [{"name": "more", "path": str(tmp_path / place)}]})
    with pytest.raises(DataError, match=r"evaluate\.extra: more: .*(there is no file|is a folder)(.|\n)*leave it out"):
        verb(line)
    assert not line.folder.exists()


def test_an_extra_file_that_has_gone_is_named(packaged: MakeLine, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"evaluate\.extra: more: .*gone\.jsonl cannot be read: No such file"):
        evaluate.run(packaged(extra=[{"name": "more", "path": str(tmp_path / "gone.jsonl")}]))


def test_no_prompt_that_fits_is_an_error_that_says_why(packaged: MakeLine) -> None:
    line = packaged(max_new_tokens=256)
    with pytest.raises(DataError, match=r"no held-out prompt can be answered; left out: 8 x longer than 256 positions(.|\n)*one\.jsonl:1"):
        evaluate.run(line)


def test_the_report_counts_answers_that_differ(packaged: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = report(packaged())
    assert silent["agreement"] is None
    assert "were not compared" in silent["notes"][0]
    same = report(packaged(speed_prompts=2))
    assert same["agreement"] == {"compared": 2, "differing": 0}
    assert "All 2 greedy answers that were compared are the same" in same["notes"][0]
    real, calls = evaluate.decode_plain, []

    def other(*args: object, **kwargs: object) -> object:
        found = real(*args, **kwargs)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 1:
            found.tokens = [*found.tokens[:-1], found.tokens[-1] ^ 1]
        return found

    monkeypatch.setattr(evaluate, "decode_plain", other)
    found = report(packaged(speed_prompts=2, max_new_tokens=8))
    assert found["agreement"] == {"compared": 2, "differing": 1}
    assert "1 of 2 greedy answers differ" in found["notes"][0]


def test_the_length_for_the_speed_is_chosen_by_greedy_acceptance(packaged: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], evaluate.position_rates

    def rates(requests: Any) -> Any:
        seen.append({r.temperature for r in requests})
        return real(requests)

    monkeypatch.setattr(evaluate, "position_rates", rates)
    found = report(packaged(temperatures=[1.0, 0.0], speed_prompts=1))
    assert found["run"]["temperature"] == 1.0
    assert seen == [{0.0}]
