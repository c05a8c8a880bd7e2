"""The examples of docs/algorithms: what `firesteel run` is told there no stage before training refuses, on a tiny target of the kind that they need."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import outside_drafter
import pytest
import torch
from hybrid_target import save_hybrid_target
from line_screen import QuietScreen
from tiny_target import recipe_settings

from firesteel.drafters import spec as specs
from firesteel.errors import FiresteelError
from firesteel.recipe import Recipe, load_recipe, recipe_from_dict
from firesteel.stages.configure import preflight
from firesteel.stages.line import Line
from firesteel.stages.sizes import drafter_shape, target_shape

DOCS = Path(__file__).parents[2] / "docs" / "algorithms"
VOCABULARY = 96


def examples(verb: str) -> list[list[str]]:
    """The words after `firesteel VERB` of every example: a recipe, and what is changed in it."""
    found = set()
    for page in DOCS.glob("*.md"):
        found |= set(re.findall(rf"^(?:    |\s*)firesteel {verb} (.*?)(?: #.*)?$", page.read_text(), re.M))
    return [shlex.split(line) for line in sorted(found)]


def on_tiny(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the target of `folder`; a draft vocabulary that this target is too small for becomes a part of its own."""
    data = recipe.model_dump()
    data["target"] = {"model": str(folder / "target"), "threads": 1, "cache_dir": str(folder / "cache")}
    for drafter in (data["drafter"], *data["evaluate"]["drafters"].values()):
        if (drafter.get("draft_vocab_size") or 0) > VOCABULARY:
            drafter["draft_vocab_size"] = VOCABULARY // 2
    return recipe_from_dict(data)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hybrid")
    save_hybrid_target(folder / "target", vocab=VOCABULARY)
    return folder


@pytest.fixture
def configured(base_folder: Path, hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], dict[str, int]]:
    """Words of an example -> parameters of its drafters, as `run` counts them before anything else."""

    def count(words: list[str]) -> dict[str, int]:
        name, *overrides = words
        if name.endswith(".yaml"):  # the reader's own
            (tmp_path / name).write_text(str({k: v for k, v in recipe_settings(base_folder).items() if k != "drafter"}))
            name = str(tmp_path / name)
        recipe = load_recipe(name, overrides)
        if recipe.drafter.module == "my_drafter":  # the reader's own, too
            monkeypatch.setitem(sys.modules, "my_drafter", outside_drafter)
            monkeypatch.setitem(specs._specs, "mine", replace(specs.get_spec("bigram"), name="mine"))
        folder = hybrid if recipe.drafter.algorithm == "mtp" else base_folder
        return preflight(Line(on_tiny(recipe, folder), QuietScreen()))

    return count


@pytest.mark.parametrize("words", examples("run"), ids=" ".join)
def test_an_example_of_run_is_not_refused(words: list[str], configured: Callable[[list[str]], dict[str, int]]) -> None:
    assert all(count > 0 for count in configured(words).values())


@pytest.mark.parametrize(
    "words",
    [
        ["smollm2", "drafter.backbone=mla"],  # reduced vocabulary, and a start from layers of another kind
        ["smollm2", "drafter.algorithm=dflash2"],
        ["smollm2", "drafter.algorithm=eagle3", "drafter.sample_from_anchor=false"],
        ["smollm2", "drafter.algorithm=dspark", "drafter.block_size=4", "package.speculative_tokens=6"],
    ],
    ids=" ".join,
)
def test_what_run_refuses_would_be_found(words: list[str], configured: Callable[[list[str]], dict[str, int]]) -> None:
    with pytest.raises(FiresteelError):
        configured(words)


@pytest.mark.parametrize("words", examples("recipe"), ids=" ".join)
def test_an_example_of_recipe_is_a_drafter(words: list[str]) -> None:
    recipe: Any = load_recipe(words[0], words[1:])
    assert drafter_shape(recipe, target_shape(recipe)).trained > 0


def test_the_pages_have_examples() -> None:
    assert len(examples("run")) > 8
    assert len(examples("recipe")) == 2
