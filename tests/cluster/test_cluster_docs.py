"""The page says what the programs say: its plan is the command's own output, its recipe is valid, its figures are the planner's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from firesteel.cli.app import app
from firesteel.cluster.hardware import load_hardware
from firesteel.cluster.topology import make_topology
from firesteel.recipe import load_recipe, recipe_from_dict
from firesteel.stages.plan import plan_of

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
COMMANDS = sorted(set(re.findall(r"^(?:    )?firesteel ((?:launch) kimi-k3-rack.*?)(?: +#.*)?$", PAGE, re.M)))


def test_the_plan_on_the_page_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, shown = re.search(r"```text\n\$ firesteel (plan .*?)\n(.*?)```", PAGE, re.S).groups()  # type: ignore[union-attr]
    monkeypatch.setenv("HOME", str(tmp_path))  # no measurement of this machine
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    assert done.output.strip() == shown.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_launch_commands_print_what_they_would_do(command: str) -> None:
    words = shlex.split(command)
    done = CliRunner().invoke(app, [*words, *([] if "--dry-run" in words else ["--dry-run"])])
    assert done.exit_code == 0, done.output
    assert "mooncake_master" in done.output
    trainers = done.output.count(" -m firesteel.cli.app ")
    assert trainers == (1 if "cluster.verb=extract" in words else 4)


def test_the_recipe_on_the_page_is_valid(tmp_path: Path) -> None:
    shown = re.search(r"```yaml\n(.*?)```", PAGE, re.S)
    assert shown
    recipe = recipe_from_dict({"train": {"max_steps": 1}, **yaml.safe_load(shown.group(1))})
    topology = make_topology(recipe)
    assert (len(topology.servers), topology.world_size) == (8, 1)


def test_the_figures_on_the_page_are_the_planners() -> None:
    found = plan_of(load_recipe("kimi-k3-rack"), load_hardware(), simulate=0.0)[1]
    assert "keeps up\nwith fourteen inference nodes" in PAGE.replace("  with", "with")
    assert round(found.balance) == 14
    muon = plan_of(load_recipe("kimi-k3-rack", ["train.optimizer=muon"]), load_hardware(), simulate=0.0)[1]
    assert round(muon.balance) == 9
