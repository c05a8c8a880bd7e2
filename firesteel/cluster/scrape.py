"""What Prometheus must be told to watch a run: servers by vLLM's own metrics, the Mooncake master by its, trainers by ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from firesteel.cluster.topology import Topology, trainer_ports
from firesteel.recipe import Node, Recipe

_HEAD = "# For Prometheus: `prometheus --config.file THIS_FILE`, or take over its scrape_configs.\n"


def scrape_config(recipe: Recipe, topology: Topology, trainer_at: Callable[[Node], str] = lambda node: node.address) -> str:
    """`prometheus.yml` with a job for each role; every target carries its node, and its group where it has one.

    Args:
        trainer_at: address of a node's trainers, where that is not the node's.
    """
    trainers = [(t, port) for t in topology.trainers for port in trainer_ports(recipe, t.processes)]
    jobs: dict[str, list[dict[str, Any]]] = {
        "inference": [_target(s.nodes[0].address, s.port, node=s.nodes[0].name, group=s.group) for s in topology.servers],
        "training": [_target(trainer_at(t.node), port, node=t.node.name, group=t.group) for t, port in trainers],
        "master": [] if topology.master is None else [_target(topology.master.address, recipe.hidden.mooncake.port + 1, node=topology.master.name)],
    }
    configs = [{"job_name": f"{recipe.name}-{role}", "static_configs": targets} for role, targets in jobs.items() if targets]
    return _HEAD + yaml.safe_dump({"global": {"scrape_interval": "15s"}, "scrape_configs": configs}, sort_keys=False)


def _target(address: str, port: int, **labels: str) -> dict[str, Any]:
    host = f"[{address}]" if ":" in address else address
    return {"targets": [f"{host}:{port}"], "labels": labels}
