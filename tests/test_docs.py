"""What the documents tell people to type exists: verbs, recipes, settings, make targets, scripts and their flags, linked files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from torch.distributed.run import get_args_parser

from firesteel.cli.app import app
from firesteel.package.convert.convert import OUT
from firesteel.package.convert.fields import read_overrides
from firesteel.recipe import load_recipe, recipe_from_dict
from firesteel.stages.ranks import TOGETHER

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
VERBS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
_STARTS = ("make ", ".venv/bin/firesteel ", "firesteel ", "python benchmarks/", "torchrun ")


def commands() -> list[tuple[str, str]]:
    """Every command of a code block or inline code, with the page that has it; comments cut off."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
        lines += [line[4:] for line in text.splitlines() if line.startswith("    ")]
        lines += re.findall(r"`([^`\n]+)`", text)
        found += [(page.name, line.split(" #")[0].strip()) for line in lines if line.strip().startswith(_STARTS)]
    return sorted(set(found))


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda value: str(value))
def test_command_exists(page: str, command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        assert set(words[1:]) <= targets
    elif words[0] == "torchrun":
        at = words.index("-m")
        get_args_parser().parse_args(words[1:])
        assert words[at + 1] == "firesteel.cli.app"
        assert words[at + 2] in TOGETHER
    elif words[0] == "python":
        script = ROOT / words[1]
        assert script.is_file()
        assert all(f'"{flag}"' in script.read_text() for flag in words[2:] if flag.startswith("--"))
    else:
        assert words[1] in VERBS or words[1] == "--help"
        if words[1] == "convert":
            read_overrides([w for w in words if "=" in w])
            assert "--to" not in words or words[words.index("--to") + 1] in OUT
        if words[1] in VERBS - {"generate", "convert", "stitch"} and len(words) > 2 and words[2].islower():
            _recipe(words[2], [w for w in words[3:] if not w.startswith("--")], tmp_path)


def _recipe(name: str, overrides: list[str], tmp_path: Path) -> None:
    if name.endswith(".yaml"):  # the reader's own: a page shows it under its name
        shown = [text for page in PAGES for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S) if text.startswith(f"# {name}\n")]
        assert len(shown) == 1, name
        file = tmp_path / name
        file.write_text(shown[0])
        name = str(file)
    assert recipe_from_dict(load_recipe(name, overrides).model_dump())


def test_the_pages_have_commands() -> None:
    assert len(commands()) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_linked_files_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link
