"""The batched engine's cost profile on file: what its key tells apart, and what it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from untrained_package import untrained

from firesteel.decoding.profile import Curve, Profile
from firesteel.stages import schedule
from firesteel.stages.engine import open_engine
from firesteel.stages.line import Line
from firesteel.stages.runtime import package_parts
from firesteel.target.paged import PagedTarget

MakeLine = Callable[..., Line]


class Files:
    """Keys of the profiles on file, with what was measured for them counted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.measured = folder / "profiles", 0
        monkeypatch.setattr(schedule, "measure_batch_profile", self.measure)

    def measure(self, *_: object, **__: object) -> Profile:
        self.measured += 1
        return Profile(Curve((1, 8), (1.0, 2.0)), Curve((1,), (0.1,)))

    @property
    def keys(self) -> list[dict[str, str]]:
        return [json.loads(p.read_text())["key"] for p in sorted(self.folder.iterdir(), key=lambda p: p.stat().st_mtime_ns)]


def test_steps_that_leave_a_thread_and_plain_attention_have_profiles_of_their_own(make_line: MakeLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line(target={"cache_dir": str(tmp_path / "cache")}, serve={"policy": "scheduled", "cache_gb": 0.01})
    package, files = untrained(line, tmp_path / "package"), Files(tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(schedule, "is_compiled", lambda: True)
    for _ in range(2):
        open_engine(line, package)
        open_engine(line, package, spare=10)
    assert files.measured == len(files.keys) == 2, "each once"
    assert "compiled attention, a thread left over in steps of up to 0 tokens" in files.keys[0]["shape"]
    assert "a thread left over in steps of up to 10 tokens" in files.keys[1]["shape"]
    assert {k["engine"] for k in files.keys} == {"batched PagedTarget PagedBlockDrafter"}
    monkeypatch.setattr(schedule, "is_compiled", lambda: False)
    open_engine(line, package)
    assert "plain attention" in files.keys[2]["shape"]


def test_threads_are_the_engines_own_not_those_of_its_last_step(make_line: MakeLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line(target={"cache_dir": str(tmp_path / "cache")}, serve={"policy": "scheduled", "cache_gb": 0.01})
    package, files = untrained(line, tmp_path / "package"), Files(tmp_path / "cache", monkeypatch)
    engine = open_engine(line, package)
    assert isinstance(engine.target, PagedTarget)
    assert files.keys[0]["machine"].endswith(f" {torch.get_num_threads()} threads")
    engine.target.threads = 64
    schedule.batch_profile(line, engine, package_parts(line.target, package))
    assert files.keys[1]["machine"].endswith(" 64 threads")
