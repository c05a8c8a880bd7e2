"""The house rules, read off the source: who imports whom, file sizes, optional dependencies, import time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "firesteel"

# Rooms that everything may use.
COMMON = {"errors", "recipe", "artifact", "kernels", "endpoints"}
# Room (or room.module) -> rooms it may import beside itself and the common ones.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "recipe_sections": set(),
    "recipe_bench": {"recipe_sections"},
    "recipe_cluster": {"recipe_sections"},
    "recipe_watch": {"recipe_sections"},
    "recipe": {"recipe_sections", "recipe_bench", "recipe_cluster", "recipe_watch"},
    "artifact": set(),
    "kernels": set(),
    "endpoints": set(),
    "prompts": set(),
    "target": set(),
    "target.vllm": {"hidden"},
    "hidden": {"target.spec"},
    "inside_vllm": {"hidden"},
    "losses": set(),
    "batches": {"hidden"},
    "drafters": {"batches"},
    "responses": {"prompts", "target"},
    "training": {"batches", "drafters", "losses", "hidden", "target"},
    "decoding": {"drafters", "target"},
    "package": {"drafters", "target.spec"},
    "evaluation": {"decoding", "package", "prompts"},
    "serving": {"target.server", "decoding", "evaluation.bench_schema"},
    "cluster": set(),
    "stages": {
        "prompts",
        "responses",
        "target",
        "hidden",
        "batches",
        "drafters",
        "losses",
        "training",
        "decoding",
        "package",
        "evaluation",
        "serving",
        "cluster",
    },
    "cli": {"stages"},
}
# Heavy or optional packages and the only rooms that may import them.
ONLY_IN = {
    "transformers": {"target", "drafters", "cli"},
    "datasets": {"prompts"},
    "pyarrow": {"prompts"},
    "matplotlib": {"evaluation"},
    "typer": {"cli"},
    "rich": {"cli"},
    "vllm": {"inside_vllm"},
    "mooncake": {"hidden"},
    "fastapi": {"serving"},
    "starlette": {"serving"},
    "uvicorn": {"serving"},
    "guidellm": {"serving"},
    "httpx": {"target", "responses", "serving"},
}
LONGEST = 400

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Imported modules of a file, each with whether the import stands inside a function."""
    found = []
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(a.name, id(node) in inside) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            base = node.module
            # `from firesteel.stages import train` names a module.
            found += [(f"{base}.{a.name}" if (ROOT / Path(*base.split(".")) / f"{a.name}.py").is_file() else base, id(node) in inside) for a in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_follow_the_rooms(path: Path) -> None:
    parts = module_name(path).split(".")
    room = parts[1] if len(parts) > 1 else ""
    for name, inside in imports(ast.parse(path.read_text())):
        top = name.split(".")[0]
        if top in ONLY_IN:
            assert room in ONLY_IN[top], f"{path}: {top} may be imported only in {sorted(ONLY_IN[top])}"
        if top != "firesteel" or name == "firesteel":
            continue
        assert not inside, f"{path}: first-party import inside a function: {name}"
        other = name.split(".")[1]
        if not room or other in COMMON or other == room or other.startswith("__"):
            continue
        allowed = MAY_IMPORT[room] | MAY_IMPORT.get(".".join(parts[1:]), set())
        assert other in allowed or any(name.startswith(f"firesteel.{a}") for a in allowed if "." in a), f"{path}: {room} may not import {name}"


def test_every_room_has_a_rule() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").is_file()} | {p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__"}
    assert rooms == {rule for rule in MAY_IMPORT if "." not in rule}


def test_no_import_cycles() -> None:
    graph = {module_name(p): {n for n, _ in imports(ast.parse(p.read_text())) if n.startswith("firesteel.")} for p in FILES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done:
            return
        for other in graph.get(name, ()):
            visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(
    "path", [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST, f"{path} has {lines} lines"


def test_importing_and_help_are_quick() -> None:
    """No PyTorch, no Transformers for `--help`, of the program or of a verb."""
    code = (
        "import sys, firesteel.cli.app as a\n"
        "from typer.testing import CliRunner\n"
        "for args in (['--help'], ['train', '--help'], ['recipe', '--list']):\n"
        "    assert CliRunner().invoke(a.app, args).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
