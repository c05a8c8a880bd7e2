"""Artifacts: committed whole or not at all, wherever a kill falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from firesteel import artifact
from firesteel.artifact import ArtifactWriter, is_current, open_artifact


class Killed(BaseException):
    """Nothing after it runs."""


def begin(folder: Path) -> ArtifactWriter:
    writer = ArtifactWriter(folder / "stage", "stage", {"a": 1}, {})
    if not writer.resumed:
        (writer / "state").mkdir()
        (writer / "state" / "long").write_text("hours of work")
        (writer / "notes").write_text("kept")
    return writer


@pytest.mark.parametrize("moment", ["hash_file", "write_atomic", "rename"])
def test_a_kill_during_the_commit_keeps_what_the_stage_resumes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    writer = begin(tmp_path)

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", kill) if moment == "rename" else patch.setattr(artifact, moment, kill)
        with pytest.raises(Killed):
            writer.commit(drop=("state",))
    again = begin(tmp_path)
    assert again.resumed
    assert (again / "state" / "long").read_text() == "hours of work"
    done = again.commit(drop=("state",))
    assert sorted(p.name for p in done.path.iterdir()) == ["manifest.json", "notes"]
    assert list(done.manifest.files) == ["notes"]


def test_a_kill_right_after_the_commit_leaves_nothing_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begin(tmp_path)

    def kill(_: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "_clear", kill)
        with pytest.raises(Killed):
            writer.commit(drop=("state",))
    assert (tmp_path / "stage" / "state").is_dir()
    assert is_current(tmp_path / "stage", "stage", writer.key)
    assert sorted(p.name for p in (tmp_path / "stage").iterdir()) == ["manifest.json", "notes"]
    assert open_artifact(tmp_path / "stage", "stage").manifest.files.keys() == {"notes"}
