"""Manifests for Kubernetes: a headless service for names, a StatefulSet a server (it comes back by itself), a Job a training node and verb."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from firesteel.cluster.process import Process
from firesteel.cluster.topology import Topology
from firesteel.errors import RecipeError
from firesteel.recipe import Node, Recipe, recipe_to_yaml

_LONGEST = 63  # characters of a name that is also a host name or a label
_TAIL = "-trainer-calibrate"  # the longest that a node's name gets, so that what trains can be calibrated
# Waits in the trainer's image, which has Python and maybe nothing else.
_WAIT = (
    "import sys, time, urllib.request\n"
    "deadline = time.monotonic() + float(sys.argv[1])\n"
    "ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open\n"
    "for url in sys.argv[2:]:\n"
    "    while True:\n"
    "        try:\n"
    "            ask(url, timeout=2)\n"
    "            break\n"
    "        except OSError as e:\n"
    "            if time.monotonic() > deadline:\n"
    "                raise SystemExit(f'{url} does not answer: {e}')\n"
    "            time.sleep(2)\n"
)


def base_name(recipe: Recipe) -> str:
    """The run's name as Kubernetes allows it; also the service's."""
    return "firesteel-" + re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")


def address_of(recipe: Recipe, node: Node) -> str:
    """The name at which a node's pod is reached. Kubernetes chooses the machine: a node of the recipe is a pod."""
    return f"{base_name(recipe)}-{node.name}-0.{base_name(recipe)}.{recipe.cluster.kubernetes.namespace}.svc"


def trainer_address(recipe: Recipe, node: Node) -> str:
    """The same of the trainer of a node: a pod of its own, since servers come back after an end and a trainer does not."""
    return address_of(recipe, node).replace(f"{node.name}-0.", f"{node.name}-trainer.", 1)


def manifests(recipe: Recipe, topology: Topology, processes: Sequence[Process]) -> str:
    """All objects, as one YAML stream for `kubectl apply -f`.

    Args:
        topology: with the addresses of `address_of`.

    Raises:
        RecipeError: a name is too long for Kubernetes.
    """
    return yaml.safe_dump_all(objects(recipe, topology, processes), sort_keys=False)


def objects(recipe: Recipe, topology: Topology, processes: Sequence[Process]) -> list[dict[str, Any]]:
    """The same as mappings."""
    name = base_name(recipe)
    found = [_service(recipe, name), _config(recipe, name)]
    for node in topology.nodes:
        mine = [p for p in processes if p.node == node]
        if not mine:
            continue
        full = f"{name}-{node.name}"
        if len(full) + len(_TAIL) > _LONGEST:
            raise RecipeError(f"{full}{_TAIL} is longer than the {_LONGEST} characters that Kubernetes allows", mend="give the run or the node a shorter name")
        kept = [p for p in mine if p.role != "trainer"]
        trainers = [p for p in mine if p.role == "trainer"]
        if kept:
            found.append(_stateful(recipe, name, full, node, kept))
        found += [_job(recipe, name, full, node, p, processes) for p in trainers]
    return found


def _labels(name: str, node: str | None = None) -> dict[str, str]:
    return {"app.kubernetes.io/name": "firesteel", "app.kubernetes.io/instance": name} | ({} if node is None else {"firesteel/node": node})


def _meta(recipe: Recipe, full: str, labels: dict[str, str]) -> dict[str, Any]:
    return {"name": full, "namespace": recipe.cluster.kubernetes.namespace, "labels": labels}


def _service(recipe: Recipe, name: str) -> dict[str, Any]:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(name), "ports": [{"name": "http", "port": 80}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(recipe, name, _labels(name)), "spec": spec}


def _config(recipe: Recipe, name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(recipe, name, _labels(name)), "data": {"recipe.yaml": recipe_to_yaml(recipe)}}


def _stateful(recipe: Recipe, name: str, full: str, node: Node, processes: list[Process]) -> dict[str, Any]:
    labels = _labels(name, node.name)
    template = {"metadata": {"labels": labels}, "spec": _pod(recipe, name, [_container(recipe, p) for p in processes])}
    spec = {"serviceName": name, "replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": _meta(recipe, full, labels), "spec": spec}


def _job(recipe: Recipe, name: str, full: str, node: Node, process: Process, all_processes: Sequence[Process]) -> dict[str, Any]:
    """Of this verb alone, since a Job cannot be changed: another verb is another Job, whose pod has the same address."""
    labels = _labels(name, f"{node.name}-trainer")
    pod = _pod(recipe, name, [_container(recipe, process)])
    urls = [p.health for p in all_processes if p.health is not None]
    wait = {"name": "wait", "image": recipe.cluster.kubernetes.image}
    wait["command"] = ["python", "-c", _WAIT, str(recipe.target.vllm.start_timeout), *urls]  # type: ignore[assignment]
    pod |= {"initContainers": [wait], "restartPolicy": "Never", "hostname": f"{full}-trainer", "subdomain": name}  # `trainer_address`
    spec = {"backoffLimit": recipe.cluster.max_restarts, "template": {"metadata": {"labels": labels}, "spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(recipe, f"{full}-trainer-{recipe.cluster.verb}", labels), "spec": spec}


def _pod(recipe: Recipe, name: str, containers: list[dict[str, Any]]) -> dict[str, Any]:
    k, shared = recipe.cluster.kubernetes, recipe.cluster.shared
    volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": name}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # vLLM's workers and PyTorch's speak through /dev/shm
    ]
    if k.claim is not None and shared is not None:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": k.claim}})
    return {"containers": containers, "volumes": volumes}


def _container(recipe: Recipe, process: Process) -> dict[str, Any]:
    k, shared = recipe.cluster.kubernetes, recipe.cluster.shared
    mounts = [{"name": "recipe", "mountPath": "/etc/firesteel"}, {"name": "memory", "mountPath": "/dev/shm"}]
    if k.claim is not None and shared is not None:
        mounts.append({"name": "shared", "mountPath": shared})
    image = k.image if process.role == "trainer" else k.inference_image or k.image
    # The run's folder is the claim's; the recipe comes from the ConfigMap.
    own = str((recipe.run_dir / "launch" / "recipe.yaml").absolute())
    argv = ["/etc/firesteel/recipe.yaml" if word == own else word for word in process.argv]
    container: dict[str, Any] = {"name": process.name, "image": image, "command": argv, "volumeMounts": mounts}
    if process.env:
        container["env"] = [{"name": key, "value": value} for key, value in process.env.items()]
    if process.ports:
        container["ports"] = [{"containerPort": port} for port in process.ports]
    if process.accelerators and process.node.kind != "cpu":
        container["resources"] = {"limits": {k.resource: str(process.accelerators)}}
    if process.health is not None:
        probe = {"httpGet": {"path": "/health", "port": process.ports[0]}, "periodSeconds": 5}
        container["readinessProbe"] = probe
        container["startupProbe"] = {**probe, "failureThreshold": max(1, round(recipe.target.vllm.start_timeout / 5))}
    return container
