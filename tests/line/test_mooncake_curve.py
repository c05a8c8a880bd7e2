"""Training cannot tell how its samples came: through a real Mooncake the same losses and weights as through a folder, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port
from safetensors.torch import load_file

from firesteel.cli.runner import LINE
from firesteel.stages import extract_server
from firesteel.stages.line import Line
from firesteel.target.server import Server
from firesteel.training.metrics import read_metrics

pytestmark = pytest.mark.mooncake

MakeLine = Callable[..., Line]
PROGRAM = Path(__file__).parents[1] / "cluster" / "states_program.py"
MASTER = Path(sys.executable).parent / "mooncake_master"


def served_line(make_line: MakeLine, python: Path, transport: str) -> Line:
    port, master = free_port(), free_port(2)
    line = make_line(
        target={"engine": "vllm", "device": "cpu", "vllm": {"python": str(python), "port": port}},
        hidden={"store": "stream", "transport": transport, "mooncake": {"port": master, "segment_gb": 1 / 16, "buffer_gb": 1 / 32}},
        train={"max_steps": 12, "validate_every": 6, "batch_tokens": 96, "accumulate": 2},
    )
    line.recipe.name = transport
    return line


def curve(line: Line) -> list[tuple[str, int, float, float]]:
    """Losses and gradient norms of training, and acceptance lengths of validation."""
    rows = read_metrics(line.folder / "train" / "metrics.jsonl")
    train = [("train", r["step"], r["loss"], r["grad_norm"]) for r in rows if r["kind"] == "train"]
    return train + [("validation", r["step"], r["acceptance_length"], 0.0) for r in rows if r["kind"] == "validation"]


def test_mooncake_and_a_folder_give_the_same_curve(make_line: MakeLine, tmp_path: Path) -> None:
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed: pip install 'firesteel[mooncake]'", exc_type=ImportError)
    python = tmp_path / "python"  # with the master beside it, as in vLLM's environment
    for path, command in ((python, f"{sys.executable} {PROGRAM}"), (tmp_path / "mooncake_master", str(MASTER))):
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)
    lines = [served_line(make_line, python, transport) for transport in ("disk", "mooncake")]
    for line in lines:
        for _, stage in LINE[:2]:
            stage(line)
        with Server(extract_server.plan(line), line.folder / "server", 300):
            for _, stage in LINE[2:4]:
                stage(line)
    through_folder, through_mooncake = lines
    assert (through_folder.folder / "exchange").is_dir()
    assert not (through_mooncake.folder / "exchange").exists()
    assert curve(through_mooncake) == curve(through_folder)
    assert {kind for kind, *_ in curve(through_folder)} == {"train", "validation"}
    wanted, found = (load_file(line.folder / "train" / "best.safetensors") for line in lines)
    assert all(found[key].equal(tensor) for key, tensor in wanted.items())
