"""What Prometheus is told of a cluster, and that its trainers show their metrics where it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cluster_fakes import recipe

from firesteel.cluster.scrape import scrape_config
from firesteel.cluster.topology import make_topology
from firesteel.errors import RecipeError
from firesteel.recipe import load_recipe
from firesteel.stages import launch
from firesteel.stages.launch import make_processes
from firesteel.stages.line import Line
from firesteel.stages.plan import plan_of, table


def jobs(text: str) -> dict[str, list[Any]]:
    return {c["job_name"]: c["static_configs"] for c in yaml.safe_load(text)["scrape_configs"]}


def test_every_role_is_scraped(folder: Path) -> None:
    made = recipe(folder, trainers=2, watch={"metrics_port": 9400}, hidden={"store": "stream", "max_length": 128, "transport": "mooncake"})
    made.cluster.trainers_per_node = 2
    topology = make_topology(made)
    found = jobs(scrape_config(made, topology))
    port = made.cluster.groups[0].port
    assert [t["targets"][0] for t in found["toy-inference"]] == [f"127.0.{k}.{i}:{port}" for k in (0, 1) for i in (1, 2)]
    assert [(t["targets"][0], t["labels"]["node"]) for t in found["toy-training"]] == [
        (f"127.0.{k}.3:{p}", f"{'ab'[k]}3") for k in (0, 1) for p in (9400, 9401)
    ]
    assert found["toy-master"] == [{"targets": [f"127.0.0.3:{made.hidden.mooncake.port + 1}"], "labels": {"node": "a3"}}]
    trainer = next(p for p in make_processes(made, topology, "local") if p.role == "trainer")
    assert "watch.metrics_host=127.0.0.3" in trainer.argv
    assert {9400, 9401} <= set(trainer.ports)


def test_without_a_port_trainers_are_not_scraped(folder: Path) -> None:
    made = recipe(folder)
    assert list(jobs(scrape_config(made, make_topology(made)))) == ["toy-inference"]
    assert not any("metrics_host" in word for p in make_processes(made, make_topology(made), "local") for word in p.argv)


def test_on_other_machines_they_listen_at_all_addresses() -> None:
    made = load_recipe("kimi-k3-rack", ["watch.metrics_port=9400"])
    trainer = next(p for p in make_processes(made, make_topology(made), "ssh") if p.role == "trainer")
    assert "watch.metrics_host=0.0.0.0" in trainer.argv


def test_on_kubernetes_trainers_are_pods_of_their_own(folder: Path) -> None:
    made = recipe(folder, watch={"metrics_port": 9400}, cluster={"shared": str(folder)})
    made.cluster.kubernetes.claim = "all"
    screen = SimpleNamespace(say=lambda text: None)
    launch.run(Line(made, screen), "kubernetes", dry_run=False)  # type: ignore[arg-type]
    found = jobs((folder / "runs/toy/launch/prometheus.yml").read_text())
    pod = "firesteel-toy-{}.firesteel-toy.default.svc:{}"
    assert [t["targets"] for t in found["toy-training"]] == [[pod.format("a3-trainer", 9400)]]
    assert found["toy-inference"][0]["targets"] == [pod.format("a1-0", made.cluster.groups[0].port)]


def test_a_port_of_metrics_that_another_has_is_refused(folder: Path) -> None:
    made = recipe(folder)
    made.watch.metrics_port = made.cluster.rendezvous_port = 29500
    made.cluster.trainers_per_node = 2
    with pytest.raises(RecipeError, match=r"port 29500 of 127\.0\.0\.3 is wanted twice"):
        plan_of(made, table(made), simulate=0.0)
