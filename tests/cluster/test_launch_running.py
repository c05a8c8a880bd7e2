"""Launching for real, with programs in the place of vLLM and Firesteel: start, wait, watch, stop; on this machine and through an `ssh` on the PATH."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster_fakes import SSH, program, recipe, settings

from firesteel.cluster import running
from firesteel.cluster.hands import work_folder
from firesteel.cluster.process import Process
from firesteel.endpoints.roster import read_urls, write_urls
from firesteel.errors import FiresteelError, RecipeError, ResourceError, TargetError, TrainingError
from firesteel.recipe import Node, Recipe, load_recipe, recipe_from_dict, recipe_to_yaml
from firesteel.stages import launch
from firesteel.stages.line import Line


class Said:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    warn = say

    def bar(self, label: str, total: float) -> Any:
        raise AssertionError("launching shows no bars")


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """`launch` sets signal handlers; tests put them back, and nothing may be left running."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGINT, before[1])


def start(made: Recipe, launcher: str = "local") -> tuple[int, list[str]]:
    said = Said()
    return launch.run(Line(made, said), launcher, dry_run=False), said.lines


def nothing_left(folder: Path) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if subprocess.run(["pgrep", "-f", f"{folder}/(server|trainer)-python"], capture_output=True, check=False).returncode == 1:
            return True
        time.sleep(0.05)
    return False


def test_servers_first_then_the_trainer_then_the_end(folder: Path) -> None:
    made = recipe(folder)
    code, said = start(made)
    assert code == 0
    assert sum("is ready at http://127.0.0." in line for line in said) == 2
    logs = folder / "runs/toy/launch/logs"
    assert sorted(p.name for p in logs.iterdir()) == ["a-server0.log", "a-server1.log", "a-trainer0.log"]
    assert str(folder / "runs/toy/server/code") in (logs / "a-server0.log").read_text()
    words = next(logs.glob("a-trainer*.log")).read_text()
    assert f"http://127.0.0.1:{made.cluster.groups[0].port},http://127.0.0.2:" in words
    assert nothing_left(folder)
    urls = (folder / "runs/toy/endpoints.txt").read_text()
    assert urls.count("http://127.0.0.") == 2


def test_the_exit_code_is_the_trainers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CODE", "7")
    code, said = start(recipe(folder))
    assert code == 7
    assert "a-trainer0 ended with code 7" in said[-1]
    assert nothing_left(folder)


@pytest.mark.parametrize(
    ("fake", "value", "words"),
    [
        ("FAKE_DIES", "127.0.0.1", "a-server0 ended with code 3: ValueError: no room on the device"),
        ("FAKE_HANGS", "1", "no sign of life within 1 s: a-server0, a-server1"),
    ],
)
def test_a_server_that_dies_or_hangs_before_training(folder: Path, monkeypatch: pytest.MonkeyPatch, fake: str, value: str, words: str) -> None:
    made = recipe(folder)
    made.target.vllm.start_timeout = 1 if fake == "FAKE_HANGS" else 20
    monkeypatch.setenv(fake, value)
    with pytest.raises(TargetError, match=words) as error:
        start(made)
    assert error.value.mend is not None
    assert "launch/logs" in error.value.mend
    assert nothing_left(folder)


def test_when_no_server_is_left_the_run_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DIES_LATER", "0.8")
    monkeypatch.setenv("FAKE_WORK", "60")
    with pytest.raises(TargetError, match="no server is left"):
        start(recipe(folder, cluster={"restarts": 0}))
    assert nothing_left(folder)
    assert "state saved" in next((folder / "runs/toy/launch/logs").glob("a-trainer*.log")).read_text(), "the trainer is interrupted, not killed"


def test_a_server_that_ends_is_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, after a pause; the second time it is done without."""
    monkeypatch.setenv("FAKE_DIES_LATER", "0.8")
    monkeypatch.setenv("FAKE_WORK", "60")
    monkeypatch.setattr(running, "_FIRST", 0.3)
    said = Said()
    with pytest.raises(TargetError, match="no server is left"):
        launch.run(Line(recipe(folder, cluster={"restarts": 1}), said), "local", dry_run=False)
    again = [line for line in said.lines if "it is started again in 0.3 s (1 of 1 times)" in line]
    assert sorted(line.split()[1] for line in again) == ["a-server0", "a-server1"]
    log = (folder / "runs/toy/launch/logs/a-server0.log").read_text()
    assert log.count("server ") == 2, "the log goes on"
    assert nothing_left(folder)


def test_a_port_that_is_taken_is_a_server_that_dies(folder: Path) -> None:

    made = recipe(folder)
    with socket.socket() as s:
        s.bind(("127.0.0.2", made.cluster.groups[0].port))
        with pytest.raises(TargetError, match=r"a-server1 ended with code 1: .*[Aa]ddress already in use"):
            start(made)
    assert nothing_left(folder)


def test_what_cannot_be_started_yet_is_refused_and_nothing_runs(folder: Path) -> None:
    with pytest.raises(TrainingError, match="2 trainer processes"):
        start(recipe(folder, trainers=2))
    assert not (folder / "runs").exists()


def test_nodes_elsewhere_need_a_shared_folder(folder: Path) -> None:
    data = settings(folder, hidden={"transport": "mooncake"})
    for i, node in enumerate(data["cluster"]["nodes"]):
        node["address"] = f"10.0.0.{i}"
    with pytest.raises(FiresteelError, match="the nodes need a folder that all of them see"):
        start(recipe_from_dict(data), "ssh")
    data["cluster"]["shared"] = "/elsewhere"
    with pytest.raises(FiresteelError, match=r"runs_dir=.* is not in cluster.shared=/elsewhere"):
        start(recipe_from_dict(data), "ssh")


@pytest.mark.parametrize("launcher", ["local", "ssh"])
def test_ctrl_c_saves_the_trainers_state_and_ends_all(folder: Path, tmp_path: Path, launcher: str) -> None:
    """The program itself, interrupted as by a terminal."""
    made = recipe(folder)
    file = tmp_path / "toy.yaml"
    file.write_text(recipe_to_yaml(made))
    env = {**os.environ, "FAKE_WORK": "60", **_fake_ssh(folder)}
    command = [sys.executable, "-m", "firesteel.cli.app", "launch", str(file), "--on", launcher]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        log = folder / "runs/toy/launch/logs/a-trainer0.log"
        deadline = time.monotonic() + 120
        while not (log.is_file() and "trainer" in log.read_text()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=90)[0]
    assert process.returncode == 130, out
    assert "state saved" in log.read_text()
    assert nothing_left(folder)


def test_through_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node is asked and given its commands through the client, by its address and with the recipe's options."""
    _set(monkeypatch, _fake_ssh(folder))
    made = recipe(folder)
    made.cluster.ssh_options = ["-l", "somebody"]
    made.cluster.shared = str(folder)
    monkeypatch.setenv("FAKE_CODE", "5")
    code, said = start(made, "ssh")
    assert code == 5
    assert "3 node(s)" in said[0]
    calls = (folder / "ssh.log").read_text().splitlines()
    assert all("-o BatchMode=yes" in c and "-l somebody" in c for c in calls)
    assert [sum(f" 127.0.0.{i} " in c for c in calls) for i in (1, 2, 3)] == [2, 2, 2], "a probe and a process each"
    assert f"hidden.exchange={folder}/exchange/toy" in "".join(calls)
    assert nothing_left(folder)


def test_a_relative_folder_through_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched below `cluster.shared`: the run is where the launcher looked for it, and processes start in the same folder."""
    _set(monkeypatch, _fake_ssh(folder))
    work = folder / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    made = recipe(folder, cluster={"shared": str(folder)})
    made.runs_dir = "runs"
    assert start(made, "ssh")[0] == 0
    assert load_recipe(str(work / "runs/toy/launch/recipe.yaml")).run_dir == work / "runs/toy"
    assert f'"folder": "{work}"' in (folder / "ssh.log").read_text()
    assert nothing_left(folder)


@pytest.mark.parametrize("seen", [True, False])
def test_relative_paths_are_those_of_the_folder_of_the_launch(folder: Path, monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    """Artifacts are known by a target's and a source's path: these are left alone where nodes see the folder, and written in full where not."""
    monkeypatch.chdir(folder)
    (folder / "prompts.jsonl").touch()
    shared = folder if seen else folder / "shared"
    sources = [{"path": "prompts.jsonl"}, {"path": "there.jsonl"}]
    data = settings(folder, prompts={"sources": sources}, hidden={"exchange": "states"}, cluster={"shared": str(shared), "python": "./trainer-python"})
    data["target"]["model"], data["runs_dir"] = "target", "runs"
    (folder / "theirs").mkdir()
    data["evaluate"] = {**data.get("evaluate", {}), "checkpoints": {"near": "theirs", "far": "there"}}
    made = recipe_from_dict(data)
    found = launch.rooted(made, "ssh")
    assert found.evaluate.checkpoints == {"near": "theirs" if seen else str(folder / "theirs"), "far": "there"}
    assert work_folder(made.cluster) == str(shared)
    assert (found.runs_dir, found.hidden.exchange, found.cluster.python) == tuple(str(folder / n) for n in ("runs", "states", "trainer-python"))
    assert found.target.model == ("target" if seen else str(folder / "target"))
    assert [s.path for s in found.prompts.sources] == ["prompts.jsonl" if seen else str(folder / "prompts.jsonl"), "there.jsonl"]
    assert found.drafter == made.drafter
    assert launch.rooted(made, "local") == made
    written = launch.rooted(made, "slurm")
    assert (written.runs_dir, written.target.model, written.cluster.python) == (str(folder / "runs"), "target", "./trainer-python")


def test_a_node_that_is_down_and_one_with_another_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, _fake_ssh(folder))
    monkeypatch.setenv("FAKE_DOWN", "127.0.0.2")
    with pytest.raises(ResourceError, match=r"node a2 \(127\.0\.0\.2\) cannot be reached by ssh: .*No route to host"):
        start(recipe(folder), "ssh")
    monkeypatch.delenv("FAKE_DOWN")
    monkeypatch.setenv("FAKE_OTHER_HOST", "127.0.0.2")
    monkeypatch.setenv("FAKE_OTHER", '{"python": "3.11", "vllm": "0.31.0"}')
    with pytest.raises(ResourceError, match=r"inference nodes differ: vllm is 0\.32\.0 on a1 and 0\.31\.0 on a2"):
        start(recipe(folder), "ssh")
    assert not (folder / "runs/toy/launch/logs").exists(), "nothing was started"


def test_the_leash_ends_what_it_holds(tmp_path: Path) -> None:
    """A launcher that dies takes its remote commands with it, children too; exit codes and signals come back."""

    def held(argv: list[str], friendly: str = "SIGTERM") -> subprocess.Popen[str]:
        task = json.dumps({"argv": argv, "env": {"X": "1"}, "folder": str(tmp_path), "signal": friendly})
        return subprocess.Popen([sys.executable, "-m", "firesteel.cluster.remote", task], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    done = held(["sh", "-c", "echo $X $PWD; exit 4"])
    assert done.stdout is not None
    assert done.stdout.read().split() == ["1", str(tmp_path)]
    assert done.wait(20) == 4
    done.communicate()
    marker = f"6543.{os.getpid()}"
    long = held(["sh", "-c", f"sleep {marker} & echo up; wait"])
    assert long.stdout is not None
    assert long.stdout.readline() == "up\n"
    long.communicate(timeout=20)
    assert long.returncode == 128 + signal.SIGTERM
    assert subprocess.run(["pgrep", "-f", f"sleep {marker}"], capture_output=True, check=False).returncode == 1
    missing = held(["/no/such/program"])
    missing.communicate()
    assert missing.returncode == 127


def test_slurm_and_kubernetes_are_written_beside_the_recipe(folder: Path) -> None:
    made = recipe(folder)
    made.cluster.shared = str(folder)
    code, said = start(made, "slurm")
    assert code == 0
    assert "start with `sbatch " in said[0]
    assert (folder / "runs/toy/launch/job.sbatch").read_text().startswith("#!/bin/bash")
    with pytest.raises(RecipeError, match=r"cluster\.kubernetes\.claim is empty"):
        start(made, "kubernetes")
    made.cluster.kubernetes.claim = "all"
    listed = folder / "runs/toy/endpoints.txt"
    write_urls(listed, ["http://10.9.9.9:8100"])  # of an earlier launch through ssh
    start(made, "kubernetes")
    assert read_urls(listed) == [f"http://firesteel-toy-a{i}-0.firesteel-toy.default.svc:{made.cluster.groups[0].port}" for i in (1, 2)]
    assert "kind: StatefulSet" in (folder / "runs/toy/launch/kubernetes.yaml").read_text()
    assert (folder / "runs/toy/launch/recipe.yaml").is_file()


def test_the_parts_of_a_server_live_together_whatever_its_groups_name() -> None:
    names = ("x-part1-server0", "x-part2-server0", "x-server0-part0", "x-server0-part1")
    units = [running._unit(Process(name, "server", Node(name="n"), ())) for name in names]
    assert units == ["x-part1-server0", "x-part2-server0", "x-server0", "x-server0"]


def _fake_ssh(folder: Path) -> dict[str, str]:
    bins = folder / "bin"
    bins.mkdir(exist_ok=True)
    program(bins / "ssh", SSH, log=str(folder / "ssh.log"))
    return {"PATH": f"{bins}:{os.environ['PATH']}"}


def _set(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
