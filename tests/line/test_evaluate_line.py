"""Evaluation on a tiny run: whose answer is whose, what a kill leaves, prompts that do not fit, and what the report says of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from line_screen import QuietScreen
from tiny_target import recipe_settings, save_tiny_target, write_prompts

from firesteel.cli.runner import LINE, run_line
from firesteel.drafters.build import make_config
from firesteel.drafters.registry import get_spec
from firesteel.errors import CheckpointError, DataError, RecipeError
from firesteel.evaluation.calibration import measure_confidence
from firesteel.evaluation.records import request_from_json
from firesteel.evaluation.report import read_report
from firesteel.evaluation.schema import Agreement
from firesteel.package.contract import make_contract
from firesteel.package.export import export
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.dropped import Dropped
from firesteel.recipe import Drafter, load_recipe, recipe_from_dict
from firesteel.stages import check, configure, evaluate, serve
from firesteel.stages.convert import convert_once
from firesteel.stages.line import Line
from firesteel.stages.prompts import read_prompts, spread_domains
from firesteel.stages.report_facts import notes_of

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


def test_the_report_measures_the_confidences_of_its_own_answers(packaged: MakeLine) -> None:
    """Those of the rounds on file, scaled as the package scales them: ECE and AUC of every position, on the prompts of the report."""
    line = packaged()
    found = report(line)
    answers = [request_from_json(r["record"]) for r in records(line.folder / "evaluate") if r["part"] == ""]
    wanted = measure_confidence(answers, bins=line.recipe.calibrate.bins)
    assert wanted is not None
    assert found["confidence"] == wanted.model_dump(mode="json")
    assert [p["position"] for p in found["confidence"]["positions"]] == [1, 2, 3, 4]
    assert all(p["rounds"] > 0 and p["ece"] is not None for p in found["confidence"]["positions"])


@pytest.fixture
def downloaded(packaged: MakeLine, tmp_path: Path) -> Path:
    """A DFlash drafter of the tiny target, untrained, that came in another layout and reads other layers than the run's own."""
    line = packaged()
    spec = line.target.spec
    config = make_config(Drafter(algorithm="dflash", block_size=4, num_layers=1), configure.target_facts(spec), (1, 2, 3), 3)
    torch.manual_seed(1)
    contract = make_contract(config, spec, template_options={}, temperatures=(), promise=None, speculative_tokens=3)
    export(tmp_path / "made", get_spec("dflash").build(config).state_dict(), config, contract, target_ids=None, head_rows=None, dtype=torch.float32)
    convert_once(line, line.screen, tmp_path / "made", tmp_path / "sglang", "sglang", [])
    convert_once(line, line.screen, tmp_path / "sglang", tmp_path / "downloaded", "speculators", [])
    return tmp_path / "downloaded"


def test_a_converted_checkpoint_is_reported_beside_the_runs_own(packaged: MakeLine, downloaded: Path, tmp_path: Path) -> None:
    file = tmp_path / "more.jsonl"
    file.write_text(json.dumps({"prompt": "w3 w14 w15"}) + "\n")

    def made(folder: Path = downloaded) -> Line:
        return packaged(checkpoints={"theirs": str(folder)}, temperatures=[0.0, 1.0], speed_prompts=2, extra=[{"name": "more", "path": str(file)}])

    configure.preflight(made())
    line = made()
    found = report(line)
    assert list(found["drafters"]) == ["dspark", "theirs"]
    theirs = found["drafters"]["theirs"]
    assert theirs["acceptance_length"]["draft_length"] == 3
    assert theirs["speedup"]["prompts"] == 2
    assert theirs["file_bytes"] == (downloaded / "model.safetensors").stat().st_size
    assert theirs["parameters"] > 0
    assert [(c["first"], c["second"], c["prompts"]) for c in found["comparisons"]] == [("dspark", "theirs", found["acceptance_length"]["requests"])]
    assert {(t["drafter"], t["temperature"]) for t in found["temperatures"]} == {(d, t) for d in ("dspark", "theirs") for t in (0.0, 1.0)}
    assert set(found["extra"]["more"]["by_drafter"]) == set(found["domains"]["shared"]["by_drafter"]) == {"dspark", "theirs"}
    assert found["agreement"]["compared"] == 4
    assert list(found["training"]) == ["dspark"]
    assert any(f"theirs was not trained by this run: it is the checkpoint in {downloaded}" in note for note in found["notes"])

    again = made()
    evaluate.run(again)
    assert "evaluate: up to date" in again.screen.lines  # type: ignore[attr-defined]
    # The same name, other weights: measured anew.
    config_file = downloaded / "config.json"
    config_file.write_text(config_file.read_text() + "\n")
    changed = made()
    evaluate.run(changed)
    assert "evaluate: up to date" not in changed.screen.lines  # type: ignore[attr-defined]


def test_checkpoints_that_do_not_fit_are_refused_before_anything_is_made(packaged: MakeLine, make_line: MakeLine, downloaded: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"evaluate\.checkpoints: theirs: .*config\.json is missing(.|\n)*firesteel convert"):
        check.run(packaged(checkpoints={"theirs": str(tmp_path / "nowhere")}))
    with pytest.raises(CheckpointError, match=r"evaluate\.checkpoints: theirs: .*config\.json is missing"):
        evaluate.run(packaged(checkpoints={"theirs": str(tmp_path / "nowhere")}))
    with pytest.raises(CheckpointError, match=r"evaluate\.checkpoints: theirs: (.|\n)*firesteel convert .*sglang NEW_FOLDER"):
        check.run(packaged(checkpoints={"theirs": str(tmp_path / "sglang")}))
    other = save_tiny_target(tmp_path / "other", seed=5)
    line = make_line(target={"model": str(other)}, evaluate={"checkpoints": {"theirs": str(downloaded)}})
    with pytest.raises(CheckpointError, match=r"evaluate\.checkpoints: theirs: .*was trained for .* \(fingerprint .*\), not for"):
        run_line(line)
    assert not line.folder.exists()
    for name in ("plain", "dspark", "eagle3"):
        with pytest.raises(RecipeError, match="another arm's name"):
            load_recipe("compare-smollm2", [f"evaluate.checkpoints={{{name}: x}}"])


@pytest.mark.parametrize(
    ("domains", "count", "wanted"),
    [
        ("abc", 3, ["a0", "b0", "c0"]),
        ("abc", 5, ["a0", "b0", "c0", "a1", "b1"]),
        ("abcdef", 3, ["a0", "c0", "e0"]),
        ("abc", 99, ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]),
        ("abc", 0, []),
    ],
)
@pytest.mark.parametrize("in_turn", [True, False])
def test_every_domain_is_timed_before_one_is_timed_twice(domains: str, count: int, wanted: list[str], in_turn: bool) -> None:
    numbered = [(d, i) for i in range(3) for d in domains] if in_turn else [(d, i) for d in domains for i in range(3)]
    prompts = [Prompt(f"{d}{i}", d, []) for d, i in numbered]
    assert [p.id for p in spread_domains(prompts, count)] == wanted


def test_the_speed_of_every_domain_is_known_with_as_many_prompts_as_domains(make_line: MakeLine) -> None:
    line = make_line(evaluate={"speed_prompts": 2})
    run_line(line)
    found = read_report(line.folder / "report.json")
    assert {name: d["speed"]["prompts"] for name, d in found["domains"].items()} == {"even": 1, "odd": 1}


def test_notes_say_what_a_bigger_budget_brings(packaged: MakeLine) -> None:
    line, dropped = packaged(), Dropped()
    dropped.add("too long", "a.jsonl:1")
    short = line.recipe.train.model_copy(update={"max_minutes": 4.0})
    line.recipe = line.recipe.model_copy(update={"train": short})
    notes = notes_of(line, Agreement(compared=3, differing=0), dropped)
    assert len(notes) == 3
    assert "All 3 greedy answers" in notes[0]
    assert notes[1].startswith("Left out: 1 x too long")
    assert "trained for 4 minutes on few answers" in notes[2]
    assert "longer training keep raising the acceptance length" in notes[2]
    assert "`firesteel run smollm2`" in notes[2]
    for minutes in (None, 15.0):
        line.recipe = line.recipe.model_copy(update={"train": short.model_copy(update={"max_minutes": minutes})})
        assert not any("keep raising" in note for note in notes_of(line, None, Dropped()))
