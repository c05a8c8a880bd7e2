"""What Prometheus must be told to watch a run: servers by vLLM's own metrics, the Mooncake master by its, trainers by ours."""

from __future__ import annotations

from typing import Any

import yaml

from firesteel.cluster.topology import Topology, trainer_ports
from firesteel.recipe import Recipe

_HEAD = "# For Prometheus: `prometheus --config.file THIS_FILE`, or take over its scrape_configs.\n"


def scrape_config(recipe: Recipe, topology: Topology) -> str:
    """`prometheus.yml` with a job for each role; every target carries its node, and its group where it has one."""
    jobs: dict[str, list[dict[str, Any]]] = {
        "inference": [_target(s.nodes[0].address, s.port, node=s.nodes[0].name, group=s.group) for s in topology.servers],
        "training": [_target(t.node.address, port, node=t.node.name, group=t.group) for t in topology.trainers for port in trainer_ports(recipe, t.processes)],
        "master": [] if topology.master is None else [_target(topology.master.address, recipe.hidden.mooncake.port + 1, node=topology.master.name)],
    }
    configs = [{"job_name": f"{recipe.name}-{role}", "static_configs": targets} for role, targets in jobs.items() if targets]
    return _HEAD + yaml.safe_dump({"global": {"scrape_interval": "15s"}, "scrape_configs": configs}, sort_keys=False)


def _target(address: str, port: int, **labels: str) -> dict[str, Any]:
    host = f"[{address}]" if ":" in address else address
    return {"targets": [f"{host}:{port}"], "labels": labels}
