"""Six machines in network namespaces: two groups of two servers and a trainer, real Mooncake, gloo. Links, servers, master, trainers and a disk fail; the
drafter is the same, bit for bit, as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Hosts, why_not
from ports import free_port
from safetensors.torch import load_file
from tiny_target import recipe_settings, save_tiny_target, write_prompts

from firesteel.recipe import recipe_from_dict, recipe_to_yaml
from firesteel.training.events import read_events, sentence
from firesteel.training.metrics import read_metrics

pytestmark = [pytest.mark.hosts, pytest.mark.mooncake, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
NAMES = ("a1", "a2", "a3", "b1", "b2", "b3")
STEPS = 260
PACE = {"STATES_PAUSE": "0.03"}  # seconds that a server takes for a document, so that things can happen meanwhile


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed: pip install 'firesteel[mooncake]'", exc_type=ImportError)
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(NAMES) as made:
        yield made


class Cluster:
    """A recipe for the machines, in a folder, and the commands of Firesteel on the first trainer's."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        save_tiny_target(folder / "target")
        write_prompts(folder / "train.jsonl", 40)
        write_prompts(folder / "eval.jsonl", 8, start=100)
        server, program = folder / "vllm-python", HERE / "states_program.py"
        server.write_text(
            f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\n'
            f'if [ -n "$FAKE_CLOCK" ]; then exec {sys.executable} {HERE / "clock_program.py"} {program} "$@"; fi\nexec {sys.executable} {program} "$@"\n'
        )
        server.chmod(0o755)
        (folder / "mooncake_master").symlink_to(Path(sys.executable).with_name("mooncake_master"))
        hosts.install_ssh(folder / "bin")
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        feed = {"groups": 2, "backoff": 0.2, "backoff_max": 1.0, "timeout": 15, "retries": 20, "outage": 120, "concurrency": 4}
        data = recipe_settings(
            folder,
            hidden={"store": "stream", "transport": "mooncake", "mooncake": {"segment_gb": 0.05, "buffer_gb": 0.02, "port": free_port(2)}, "feed": feed},
            target={"engine": "vllm", "vllm": {"python": str(server), "start_timeout": 200}},
            train={"max_steps": STEPS, "validate_every": 50, "checkpoint_minutes": 0.02},
        )
        data["cluster"] = {
            "launcher": "ssh",
            "shared": str(folder),
            "python": sys.executable,
            "nodes": [{"name": n, "address": hosts.address(n)} for n in NAMES],
            "groups": [{"name": g, "inference": [f"{g}1", f"{g}2"], "training": [f"{g}3"]} for g in "ab"],
            "verb": "train",
            "max_restarts": 3,
            "restarts": 5,
            "env": {"inference": {**env, **PACE}, "training": {**env, "GLOO_SOCKET_IFNAME": "eth0"}},  # machines share their name here
        }
        (folder / "tiny.yaml").write_text(recipe_to_yaml(recipe_from_dict(data)))

    def command(self, verb: str, *overrides: str) -> list[str]:
        return self.hosts.command("a3", [sys.executable, "-m", "firesteel.cli.app", verb, str(self.folder / "tiny.yaml"), *overrides])

    def env(self, clock: str = "") -> dict[str, str]:
        wrong = {f"FAKE_ENV_{self.hosts.address('a2').replace('.', '_')}": f"FAKE_CLOCK={clock}"} if clock else {}
        return {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", **wrong}

    def run(self, verb: str, *overrides: str) -> None:
        done = subprocess.run(self.command(verb, *overrides), capture_output=True, text=True, timeout=400, check=False, env=self.env())
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()

    def logs(self) -> str:
        return "".join(f"\n--- {p}\n{p.read_text()[-2000:]}" for p in sorted((self.folder).glob("runs*/tiny/launch/logs/*.log")))


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    made = Cluster(hosts, tmp_path_factory.mktemp("cluster"))
    made.run("prompts")
    made.run("respond")
    made.run("launch", "cluster.verb=extract")
    return made


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Path:
    """The run's folder after a training in which nothing happens."""
    cluster.run("launch")
    return cluster.folder / "runs/tiny"


class Watched:
    """A launch that goes on beside the test."""

    def __init__(self, cluster: Cluster, runs: Path, **env: str) -> None:
        self.cluster, self.folder = cluster, runs / "tiny"
        self.log = (runs.parent / f"{runs.name}.log").open("ab")
        self.process = subprocess.Popen(cluster.command("launch", f"runs_dir={runs}"), stdout=self.log, stderr=subprocess.STDOUT, env=cluster.env(**env))

    def step(self) -> int:
        steps = [r["step"] for r in read_metrics(self.folder / "train.partial" / "metrics.jsonl") if r["kind"] == "train"]
        return int(steps[-1]) if steps else 0

    def at(self, step: int) -> None:
        """Wait until training has come so far."""
        self.until(lambda: self.step() >= step, f"step {step}")

    def until(self, true: Callable[[], bool], what: str, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, f"it ended before {what}: {self.said()}"
            assert time.monotonic() < deadline, f"no {what} (step {self.step()}): {self.said()}"
            time.sleep(0.1)

    def end(self) -> int:
        try:
            return self.process.wait(300)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said()}") from None

    def said(self) -> str:
        return Path(self.log.name).read_text() + self.cluster.logs()


def test_a_run_on_six_machines(undisturbed: Path) -> None:
    about = json.loads((undisturbed / "train" / "manifest.json").read_text())["about"]
    assert (about["steps"], about["processes"]) == (STEPS, 2)
    scrape = (undisturbed / "launch" / "prometheus.yml").read_text()
    assert "10.77.0.2:8100" in scrape


def test_everything_fails_once_and_nothing_is_lost(cluster: Cluster, undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = cluster.folder / "runs-disturbed"
    disk = tmp_path_factory.mktemp("disk")
    runs.symlink_to(disk)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], check=True)
    try:
        for stage in ("prompts", "responses", "hidden"):
            shutil.copytree(cluster.folder / "runs/tiny" / stage, disk / "tiny" / stage)
        _disturb(cluster, Watched(cluster, runs, clock="86400"), disk)
        again = Watched(cluster, runs)
        assert again.end() == 0, again.said()
        _compare(undisturbed, disk / "tiny")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def _disturb(cluster: Cluster, run: Watched, disk: Path) -> None:
    hosts = cluster.hosts
    run.at(20)
    hosts.cut("a1")
    time.sleep(4)
    hosts.heal("a1")
    run.at(50)
    assert hosts.kill("b1", "states_program") > 0
    run.until(lambda: "b-server0 has ended" in run.said(), "word of the killed server")
    run.at(80)
    hosts.throttle("b2", "4mbit")
    run.at(110)
    assert hosts.kill("a3", "mooncake_master") > 0
    run.until(lambda: "master has ended" in run.said(), "word of the killed master")
    run.at(160)
    killed = time.monotonic()
    assert hosts.kill("b3", "firesteel.cli.app train") > 0
    run.until(lambda: len(starts(run.folder / "train.partial")) == 2, "restart of the trainers")
    assert time.monotonic() - killed < 60, "a trainer that is lost is back within a minute"
    before = run.step()
    run.until(lambda: run.step() > max(before, 160), "a step after the restart")
    run.at(200)
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as f:
        while True:
            f.write(bytes(10_000))
            f.flush()
    assert run.end() == 1, run.said()
    assert "No space left on device" in run.said(), run.said()
    filler.unlink()


def starts(folder: Path) -> list[int]:
    """The steps at which training began or went on."""
    return [e.step for e in read_events(folder) if e.rule == "run" and e.what.startswith(("training begins", "training goes on"))]


def _compare(undisturbed: Path, disturbed: Path) -> None:
    curves = [{r["step"]: r["loss"] for r in read_metrics(f / "train" / "metrics.jsonl") if r["kind"] == "train"} for f in (undisturbed, disturbed)]
    assert curves[0].keys() == curves[1].keys(), "the same steps, none twice"
    apart = [step for step, loss in curves[0].items() if curves[1][step] != loss]
    events = [sentence(e) for e in read_events(disturbed / "train")]
    assert apart == [], f"losses differ from step {apart[0]} on: {events}"
    ours, theirs = (load_file(f / "train" / "best.safetensors") for f in (undisturbed, disturbed))
    assert all(t.equal(theirs[name]) for name, t in ours.items())
    manifests = [json.loads((f / "train" / "manifest.json").read_text())["about"] for f in (undisturbed, disturbed)]
    assert manifests[0]["acceptance_length"] == manifests[1]["acceptance_length"]
