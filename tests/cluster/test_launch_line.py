"""One command from nothing to a package: two servers that give real states and the real trainer, all started by `firesteel launch`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from tiny_target import recipe_settings, save_tiny_target, write_prompts

from firesteel.recipe import recipe_from_dict, recipe_to_yaml

HERE = Path(__file__).parent


def write(folder: Path, **more: Any) -> tuple[Path, int]:
    """A target, prompts and a recipe whose servers give real states; the file and the servers' port."""
    save_tiny_target(folder / "target")
    write_prompts(folder / "train.jsonl", 40)
    write_prompts(folder / "eval.jsonl", 8, start=100)
    server = folder / "vllm-python"
    server.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\nexec {sys.executable} {HERE / "states_program.py"} "$@"\n')
    server.chmod(0o755)
    port = free_port()
    hidden = {"store": "stream", **more.pop("hidden", {})}
    data = recipe_settings(folder, hidden=hidden, target={"engine": "vllm", "vllm": {"python": str(server), "start_timeout": 300}}, **more.pop("sections", {}))
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    data["cluster"] = {"env": {"inference": env, "training": env}, **more["cluster"](port)}
    (folder / "tiny.yaml").write_text(recipe_to_yaml(recipe_from_dict(data)))
    return folder / "tiny.yaml", port


def firesteel(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "firesteel.cli.app", *args], capture_output=True, text=True, timeout=540, check=False)


def three_nodes(port: int) -> dict[str, Any]:
    nodes = [{"name": f"n{i}", "address": f"127.0.0.{i}"} for i in (1, 2, 3)]
    return {"nodes": nodes, "groups": [{"name": "g", "inference": ["n1", "n2"], "training": ["n3"], "port": port}]}


def two_groups(port: int) -> dict[str, Any]:
    nodes = [{"name": f"{g}{i}", "address": f"127.0.{k}.{i}"} for k, g in enumerate("ab") for i in (1, 2)]
    groups = [{"name": g, "inference": [f"{g}1"], "training": [f"{g}2"], "port": port} for g in "ab"]
    return {"nodes": nodes, "groups": groups, "verb": "train", "rendezvous_port": free_port()}


def answers(folder: Path) -> dict[str, int]:
    return {row["url"]: row["answers"] for row in json.loads((folder / "endpoints.json").read_text())}


def nothing_left(folder: Path) -> bool:
    return subprocess.run(["pgrep", "-f", str(folder / "vllm-python")], capture_output=True, check=False).returncode == 1


@pytest.mark.slow
def test_a_run_on_three_nodes_of_this_machine(tmp_path: Path) -> None:
    file, port = write(tmp_path, cluster=three_nodes)
    done = firesteel("launch", str(file))
    folder = tmp_path / "runs/tiny"
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "launch/logs/g-trainer0.log").read_text()[-3000:]
    assert (folder / "package" / "model.safetensors").is_file()
    assert (folder / "report.json").is_file()
    assert json.loads((folder / "train" / "manifest.json").read_text())["about"]["steps"] == 12
    assert set(answers(folder)) == {f"http://127.0.0.{i}:{port}" for i in (1, 2)}
    assert all(count > 0 for count in answers(folder).values()), "both servers were asked"
    assert nothing_left(tmp_path)


@pytest.mark.slow
def test_two_groups_train_one_drafter(tmp_path: Path) -> None:
    """A server and a trainer each, under torchrun, a rank asking its own group's server."""
    file, _ = write(tmp_path, cluster=two_groups, hidden={"feed": {"groups": 2}})
    for verb in ("prompts", "respond"):
        assert firesteel(verb, str(file)).returncode == 0
    folder = tmp_path / "runs/tiny"
    # The stage that lists the documents checks the states of a few, for which servers must be up: it has a launch of its own.
    assert "`firesteel run` is the work of one" in firesteel("launch", str(file), "cluster.verb=run").stderr
    listed = firesteel("launch", str(file), "cluster.verb=extract")
    assert listed.returncode == 0, listed.stdout + listed.stderr + (folder / "launch/logs/a-trainer0.log").read_text()[-3000:]
    done = firesteel("launch", str(file))
    logs = "".join(p.read_text()[-3000:] for p in (folder / "launch/logs").glob("*trainer*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert json.loads((folder / "train" / "manifest.json").read_text())["about"]["steps"] == 12
    assert nothing_left(tmp_path)
