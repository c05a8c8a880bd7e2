from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from line_screen import QuietScreen
from tiny_target import recipe_settings, save_tiny_target, write_prompts

from firesteel.recipe import recipe_from_dict
from firesteel.stages.line import Line


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and prompts that tests only read."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("line")
    save_tiny_target(folder / "target")
    write_prompts(folder / "train.jsonl", 40)
    write_prompts(folder / "eval.jsonl", 8, start=100)
    return folder


@pytest.fixture
def make_line(base_folder: Path, tmp_path: Path):
    """A line whose runs lie in a folder of the test's own; keyword arguments are sections."""

    def make(**sections: dict[str, object]) -> Line:
        settings = recipe_settings(base_folder, **sections)
        settings["runs_dir"] = str(tmp_path / "runs")
        return Line(recipe_from_dict(settings), QuietScreen())

    return make
