"""`firesteel serve` with a real vLLM: the check passes for what was trained, and fails for a drafter that reads a neighbouring layer."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from served_drafts import Served
from served_environment import vllm_environment

from firesteel.errors import VerificationError
from firesteel.recipe import recipe_from_dict
from firesteel.stages import serve
from firesteel.stages.line import Line

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture
def line(draft: Callable[[str], Served], vllm_python: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    for name, value in vllm_environment(second_runner=False).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    made = draft("dflash").line
    settings = made.recipe.model_dump() | {"serve": {"python": str(vllm_python), "port": port, "max_model_len": 256, "start_timeout": 600}}
    return Line(recipe_from_dict(settings), made.screen)


def test_the_drafter_that_was_trained_passes(line: Line) -> None:
    serve.run(line, None, dry_run=False, smoke=True)
    smoke = json.loads((line.folder / "serve" / "smoke.json").read_text())
    assert smoke["engine"].startswith("vllm")
    assert smoke["acceptance_length"] == pytest.approx(smoke["expected"]["acceptance_length"], rel=0.02)
    assert sum(smoke["counters"]["by_position"]) == smoke["counters"]["accepted"] > 100
    assert "Checked with vllm" in (line.folder / "package" / "DEPLOY.md").read_text()


def test_one_layer_off_is_found(line: Line, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(line.folder, run)
    for name, places in (("config.json", [[]]), ("firesteel.json", [["contract"], ["draft"]])):
        data = json.loads((run / "package" / name).read_text())
        for place in places:
            part = data
            for key in place:
                part = part[key]
            for key in ("aux_hidden_state_layer_ids", "layer_ids"):
                if key in part:
                    part[key] = [i - 1 for i in part[key]]
        (run / "package" / name).write_text(json.dumps(data))
    with pytest.raises(VerificationError, match="served, the drafter reaches acceptance length"):
        serve.run(line, run / "package", dry_run=False, smoke=True)
