"""A cluster is checked as a whole before anything starts: what cannot be is refused with the setting and the mend, all of it at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from firesteel.cluster.costs import Memory, server_memory, trainer_memory
from firesteel.cluster.hardware import Hardware
from firesteel.cluster.process import unknown_address
from firesteel.cluster.shapes import DrafterShape, TargetShape
from firesteel.cluster.topology import CPU, LOOPBACK, Topology
from firesteel.errors import FiresteelError, RecipeError, ResourceError
from firesteel.recipe import Node, Recipe

_OWN_MACHINE = "the table's kind cpu is a small machine: `firesteel plan RECIPE --measure` puts this one in its place; or name what you have in cluster.nodes"


def check_cluster(recipe: Recipe, topology: Topology, hardware: Mapping[str, Hardware], target: TargetShape, drafter: DrafterShape) -> None:
    """Refuse a cluster that cannot run this recipe as `cluster.launcher` starts it.

    Raises:
        RecipeError, ResourceError: the only thing that is wrong, or a list of all that is.
    """
    found: list[FiresteelError] = []
    for check in (_kinds, _ports, _devices, _addresses, _world):
        found += check(recipe, topology, hardware)
    if all(node.kind in hardware for node in topology.nodes):
        found += _memory(recipe, topology, hardware, target, drafter)
    found += _layers(recipe, target)
    if len(found) == 1:
        raise found[0]
    if found:
        lines = [f"{e.message}" + (f" -> {e.mend}" if e.mend else "") for e in found]
        raise type(found[0])(f"{len(found)} things are wrong with this cluster:\n  - " + "\n  - ".join(lines))


def _kinds(recipe: Recipe, topology: Topology, hardware: Mapping[str, Hardware]) -> Iterator[FiresteelError]:
    for node in topology.nodes:
        if node.kind not in hardware:
            yield RecipeError(
                f"cluster.nodes: {node.name} is of kind {node.kind!r}, which the hardware table does not have",
                mend=f"one of {', '.join(sorted(hardware))}, or add a row in the file of cluster.hardware",
            )


def _ports(recipe: Recipe, topology: Topology, hardware: Mapping[str, Hardware]) -> Iterator[FiresteelError]:
    taken: dict[tuple[str, int], str] = {}
    for name, port, what, setting in topology.ports:
        address = _address(recipe, topology.node(name))
        if (address, port) in taken:
            where = f"node {name}" if address == unknown_address(name) else address
            yield RecipeError(
                f"port {port} of {where} is wanted twice: by {taken[address, port]} and by {what} (node {name})",
                mend="give the groups ports that are further apart (cluster.groups: port), or change cluster.rendezvous_port, hidden.mooncake.port "
                "or watch.metrics_port",
            )
        elif port > 65535:
            yield RecipeError(f"{what} on node {name} would listen at port {port}, and ports end at 65535", mend=f"set a lower {setting}")
        taken.setdefault((address, port), what)


def _devices(recipe: Recipe, topology: Topology, hardware: Mapping[str, Hardware]) -> Iterator[FiresteelError]:
    for node in topology.nodes:
        if node.kind == CPU:
            continue  # processes share cores
        servers = sum(s.accelerators // len(s.nodes) for s in topology.servers if node in s.nodes)
        trainers = sum(t.processes for t in topology.trainers if t.node == node)
        if servers + trainers > node.accelerators:
            yield RecipeError(
                f"node {node.name} has {node.accelerators} accelerators, its servers and trainers want {servers + trainers}",
                mend="let a node either capture or train (two nodes with one address may share a machine's accelerators out), or set fewer "
                "cluster.trainers_per_node",
            )


def _addresses(recipe: Recipe, topology: Topology, hardware: Mapping[str, Hardware]) -> Iterator[FiresteelError]:
    addresses = {_address(recipe, n) for n in topology.nodes}
    local = sorted(a for a in addresses if a.startswith(LOOPBACK))
    if local and len(local) < len(addresses):
        yield RecipeError(
            f"cluster.nodes: {local[0]} is an address of this machine alone, but other nodes are elsewhere",
            mend="give the address at which the other nodes reach it",
        )
    if len(addresses) > max(1, len(local)) and recipe.hidden.transport == "disk" and recipe.hidden.exchange is None and recipe.cluster.shared is None:
        yield RecipeError(
            "hidden.transport=disk needs a folder that all nodes see", mend="set cluster.shared to it, or hidden.exchange, or hidden.transport=mooncake"
        )


def _address(recipe: Recipe, node: Node) -> str:
    """Slurm and Kubernetes choose a machine for each node, whatever its address in the recipe."""
    return unknown_address(node.name) if recipe.cluster.launcher in ("slurm", "kubernetes") else node.address


def _world(recipe: Recipe, topology: Topology, hardware: Mapping[str, Hardware]) -> Iterator[FiresteelError]:
    world, shared, parts = topology.world_size, recipe.train.context_ranks, recipe.hidden.feed.groups
    if world % shared:
        yield RecipeError(
            f"{world} trainer processes do not divide into batches of train.context_ranks={shared} each",
            mend=f"set train.context_ranks to a divisor of {world}, or cluster.trainers_per_node",
        )
    if parts > 1:
        # The feed cuts lists of ranks and of servers into equal parts: they are the cluster's groups only where those are alike.
        sizes = {(sum(s.group == g.name for s in topology.servers), sum(t.processes for t in topology.trainers if t.group == g.name)) for g in topology.groups}
        if parts != len(topology.groups) or len(sizes) > 1:
            yield RecipeError(
                f"hidden.feed.groups={parts} cuts {world} trainer processes and {len(topology.servers)} servers into equal parts, "
                f"which the {len(topology.groups)} of cluster.groups are not",
                mend="set hidden.feed.groups=1, so that every trainer asks every server, or give all groups as many of each",
            )


def _memory(recipe: Recipe, topology: Topology, hardware: Mapping[str, Hardware], target: TargetShape, drafter: DrafterShape) -> Iterator[FiresteelError]:
    length, concurrency = recipe.hidden.max_length, recipe.hidden.feed.concurrency
    for kind, accelerators in dict.fromkeys((s.nodes[0].kind, s.accelerators) for s in topology.servers):  # one word for all that are alike
        memory = server_memory(target, hardware[kind], accelerators, length, concurrency)
        if not memory.fits:
            spot = next(s for s in topology.servers if s.accelerators == accelerators and s.nodes[0].kind == kind)
            yield ResourceError(
                f"server {spot.name}: {target.name} needs {_sum(memory)} on each of {accelerators} accelerator(s) of kind {kind}",
                mend=_OWN_MACHINE if kind == CPU else "set a larger tensor_parallel, or lower hidden.feed.concurrency",
            )
    for kind in dict.fromkeys(t.node.kind for t in topology.trainers):
        memory = trainer_memory(target, drafter, recipe.train, hardware[kind], recipe.target.dtype, topology.world_size)
        if not memory.fits:
            yield ResourceError(
                f"a trainer process needs {_sum(memory)} on an accelerator of kind {kind}",
                mend=_OWN_MACHINE if kind == CPU else "set train.batch_tokens or train.anchors lower, or drafter.num_layers",
            )


def _layers(recipe: Recipe, target: TargetShape) -> Iterator[FiresteelError]:
    ids = recipe.target.layer_ids
    if isinstance(ids, str):
        return
    bad = [i for i in ids if not 0 <= i <= target.layers]
    if bad:
        yield RecipeError(
            f"target.layer_ids has {bad[0]}, but {target.name} has {target.layers} layers",
            mend=f"ids go from 0 (embeddings) to {target.layers}",
        )


def _sum(memory: Memory) -> str:
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in memory.parts.items())
    return f"{memory.needed / 1e9:.1f} GB ({parts}), {memory.room / 1e9:.1f} GB may be used,"
