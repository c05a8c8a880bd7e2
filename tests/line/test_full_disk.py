"""A full or forbidden disk is one clear error wherever it is met; here `/dev/full` takes the place of what is written."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from line_screen import QuietScreen
from safetensors import SafetensorError
from safetensors.torch import save_file
from tiny_target import recipe_settings

from firesteel.artifact import disk_errors
from firesteel.cli.app import main
from firesteel.cli.runner import LINE
from firesteel.errors import DataError, ResourceError
from firesteel.recipe import recipe_from_dict
from firesteel.stages.line import Line
from firesteel.training.metrics import MetricsLog

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.is_char_device(), reason="needs Linux's /dev/full")


@pytest.fixture(scope="module")
def packaged(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's file of a run that only wants its evaluation."""
    folder = tmp_path_factory.mktemp("full")
    settings = {**recipe_settings(base_folder), "runs_dir": str(folder / "runs")}
    line = Line(recipe_from_dict(settings), QuietScreen())
    for _, stage in LINE[:-1]:
        stage(line)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def opens_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `Path.open` of a file of this name, to append, opens a disk that has no room."""
    real: Callable[..., Any] = Path.open

    def open_(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return real(FULL if self.name == name and "a" in mode else self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_)


def said_by(verb: str, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says on its way to exit code 1."""
    monkeypatch.setattr(sys, "argv", ["firesteel", verb, str(recipe)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        main()
    assert e.value.code == 1
    found = capsys.readouterr().err
    assert "Traceback" not in found
    assert found.count("error:") == 1
    return found


def test_answers_that_do_not_fit_while_they_are_measured(packaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opens_full("requests.jsonl", monkeypatch)
    found = said_by("evaluate", packaged, monkeypatch, capsys)
    assert f"error: cannot write {packaged.parent / 'runs' / 'tiny'}: No space left on device" in found
    assert "GB free there" in found
    assert "-> free some space" in found


def test_a_report_that_does_not_fit(packaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The copy in the run's folder is the last thing written; what was measured is kept."""
    report = packaged.parent / "runs" / "tiny" / "report.json"
    report.symlink_to(FULL)
    assert f"error: cannot write {report.parent}: No space left on device" in said_by("evaluate", packaged, monkeypatch, capsys)
    report.unlink()
    assert (report.parent / "evaluate" / "report.json").is_file()


def test_metrics_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        opens_full("metrics.jsonl", patch)
        log = MetricsLog(tmp_path, 0)
        with pytest.raises(ResourceError, match=r"cannot write .*metrics\.jsonl: No space left"):
            log.write("train", 1, {"loss": 1.0})
        log.close()
    log = MetricsLog(tmp_path, 0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(log._board, "add_scalar", full)  # as TensorBoard tells what its thread met
    with pytest.raises(ResourceError, match="No space left"):
        log.write("train", 1, {"loss": 1.0})
    log.close()


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    """Safetensors has an error of its own, with the system's number in its text."""
    with pytest.raises(ResourceError, match=f"cannot write {tmp_path}: No space left on device"), disk_errors(tmp_path):
        raise SafetensorError('Error while serializing: I/O error: No space left on device (os error 28) at path "x/.tmpQ"')
    with pytest.raises(SafetensorError, match="No such file"), disk_errors(tmp_path):
        save_file({"a": torch.zeros(4)}, tmp_path / "nowhere" / "model.safetensors")


@pytest.mark.parametrize("known", [True, False])
def test_a_write_without_a_name(tmp_path: Path, known: bool) -> None:
    words = f"cannot write {tmp_path}: No space left" if known else "a file cannot be written: No space left"
    with pytest.raises(ResourceError, match=words), disk_errors(tmp_path if known else None), FULL.open("w") as file:
        file.write("x")


def test_what_may_not_be_used_is_named(tmp_path: Path) -> None:
    for number in (errno.EACCES, errno.EPERM):
        with pytest.raises(ResourceError, match=r"cannot use .*place: .*\n.*give this user the right"), disk_errors(tmp_path):
            raise PermissionError(number, os.strerror(number), str(tmp_path / "place"))


@pytest.mark.parametrize(
    "error", [DataError("x (os error 28)"), FileNotFoundError(errno.ENOENT, "no such file", "a"), ValueError("(os error 2)"), KeyError("a")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as e, disk_errors(Path("somewhere")):
        raise error
    assert e.value is error
