"""One command from nothing to a package: two servers that give real states and the real trainer, all started by `firesteel launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster_fakes import free_port
from tiny_target import recipe_settings, save_tiny_target, write_prompts

from firesteel.recipe import recipe_from_dict, recipe_to_yaml

HERE = Path(__file__).parent


def test_a_run_on_three_nodes_of_this_machine(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    write_prompts(tmp_path / "train.jsonl", 40)
    write_prompts(tmp_path / "eval.jsonl", 8, start=100)
    server = tmp_path / "vllm-python"
    server.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\nexec {sys.executable} {HERE / "states_program.py"} "$@"\n')
    server.chmod(0o755)
    port = free_port()
    data = recipe_settings(tmp_path, hidden={"store": "stream"}, target={"engine": "vllm", "vllm": {"python": str(server), "start_timeout": 300}})
    data["cluster"] = {
        "nodes": [{"name": f"n{i}", "address": f"127.0.0.{i}"} for i in (1, 2, 3)],
        "groups": [{"name": "g", "inference": ["n1", "n2"], "training": ["n3"], "port": port}],
        "env": {"inference": {"OMP_NUM_THREADS": "1"}, "training": {"OMP_NUM_THREADS": "1"}},
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(recipe_to_yaml(recipe_from_dict(data)))
    command = [sys.executable, "-m", "firesteel.cli.app", "launch", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    logs = tmp_path / "runs/tiny/launch/logs"
    assert done.returncode == 0, done.stdout + done.stderr + (logs / "g-trainer0.log").read_text()[-3000:]
    folder = tmp_path / "runs/tiny"
    assert (folder / "package" / "model.safetensors").is_file()
    assert (folder / "report.json").is_file()
    assert json.loads((folder / "train" / "manifest.json").read_text())["about"]["steps"] == 12
    status = {row["url"]: row["answers"] for row in json.loads((folder / "endpoints.json").read_text())}
    assert set(status) == {f"http://127.0.0.{i}:{port}" for i in (1, 2)}
    assert all(count > 0 for count in status.values()), "both servers were asked"
    assert subprocess.run(["pgrep", "-f", str(server)], capture_output=True, check=False).returncode == 1
