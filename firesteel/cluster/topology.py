"""From `cluster` in a recipe to what runs where: servers, trainers, master, and who listens at which address and port."""

from __future__ import annotations

from dataclasses import dataclass

from firesteel.errors import RecipeError
from firesteel.recipe import Group, Node, Recipe

CPU = "cpu"
LOOPBACK = ("127.", "localhost", "::1")  # how an address of this machine alone begins


@dataclass(frozen=True)
class ServerSpot:
    """A server: on part of a node, on a node, or over several.

    Attributes:
        group: name of its group.
        number: among the servers of the group, from 0.
        nodes: in the order of ranks; the first one answers requests.
        accelerators: over all nodes.
        first: number of the first accelerator on a node that it shares with others.
        port: where its first node listens.
        rendezvous: port at which its parts find each other; 0 where it has one part.
    """

    group: str
    number: int
    nodes: tuple[Node, ...]
    accelerators: int
    first: int
    port: int
    rendezvous: int

    @property
    def name(self) -> str:
        return f"{self.group}-server{self.number}"

    @property
    def url(self) -> str:
        return f"http://{self.nodes[0].address}:{self.port}"


@dataclass(frozen=True)
class TrainerSpot:
    """The trainer processes of a node; `rank` counts nodes."""

    group: str
    node: Node
    rank: int
    processes: int

    @property
    def name(self) -> str:
        return f"{self.group}-trainer{self.rank}"


@dataclass(frozen=True)
class Topology:
    """A cluster with every process in its place.

    Attributes:
        master: node of the Mooncake master, None where there is none to start.
        ports: (node name, port, what listens there, the setting that says so), of all processes.
    """

    nodes: tuple[Node, ...]
    groups: tuple[Group, ...]
    servers: tuple[ServerSpot, ...]
    trainers: tuple[TrainerSpot, ...]
    master: Node | None
    ports: tuple[tuple[str, int, str, str], ...]

    @property
    def world_size(self) -> int:
        """Trainer processes, over all nodes."""
        return sum(t.processes for t in self.trainers)

    def node(self, name: str) -> Node:
        return next(n for n in self.nodes if n.name == name)

    def devices(self, node: Node, first: int, count: int) -> str | None:
        """CUDA_VISIBLE_DEVICES of a process that has `count` of a node's accelerators from its `first` on; None where that is all of the machine.

        Nodes at one address are parts of one machine, whose accelerators are numbered through them in their order.
        """
        beside = [n for n in self.nodes if n.kind != CPU and _machine(n) == _machine(node)]
        if node.kind == CPU or count == sum(n.accelerators for n in beside):
            return None
        first += sum(n.accelerators for n in beside[: beside.index(node)])
        return ",".join(map(str, range(first, first + count)))


def make_topology(recipe: Recipe) -> Topology:
    """Place every process.

    Raises:
        RecipeError: a name is unknown or given twice, a group lacks a role, or servers do not divide into its nodes.
    """
    c = recipe.cluster
    nodes = tuple(c.nodes) or (Node(name="here", kind=CPU),)
    _once([n.name for n in nodes], "cluster.nodes")
    by_name = {n.name: n for n in nodes}
    groups = tuple(c.groups) or (Group(name="all", inference=[n.name for n in nodes[:-1]] or [nodes[0].name], training=[nodes[-1].name]),)
    _once([g.name for g in groups], "cluster.groups")
    servers: list[ServerSpot] = []
    trainers: list[TrainerSpot] = []
    used: dict[str, str] = {}
    for group in groups:
        for role, names in (("inference", group.inference), ("training", group.training)):
            _check_names(group.name, role, names, by_name)
        _check_owned(group, used)
        servers += _servers(group, [by_name[n] for n in group.inference], group.tensor_parallel or recipe.target.vllm.tensor_parallel, recipe)
        for name in group.training:
            node = by_name[name]
            trainers.append(TrainerSpot(group.name, node, len(trainers), c.trainers_per_node or (1 if node.kind == CPU else node.accelerators)))
    master = None
    if recipe.hidden.transport == "mooncake" and recipe.hidden.mooncake.master is None:
        if c.master is not None and c.master not in by_name:
            raise RecipeError(f"cluster.master={c.master} is not among cluster.nodes", mend=f"one of {', '.join(by_name)}")
        master = by_name[c.master] if c.master is not None else trainers[0].node
    return Topology(nodes, groups, tuple(servers), tuple(trainers), master, tuple(_ports(recipe, servers, trainers, master)))


def _servers(group: Group, nodes: list[Node], width: int, recipe: Recipe) -> list[ServerSpot]:
    """Servers of a group, node after node: several on a node that has room for them, or one over several whole nodes."""
    found: list[ServerSpot] = []
    at = 0
    while at < len(nodes):
        node = nodes[at]
        if width <= node.accelerators:
            if node.accelerators % width:
                raise RecipeError(
                    f"cluster.groups: {group.name}: servers over {width} accelerators (tensor_parallel) leave {node.accelerators % width} of {node.name}'s "
                    f"{node.accelerators} idle",
                    mend="set tensor_parallel to a divisor of the node's accelerators, or the node's accelerators to what a run shall use",
                )
            for i in range(node.accelerators // width):
                found.append(ServerSpot(group.name, len(found), (node,), width, i * width, group.port + i, 0))
            at += 1
            continue
        if width % node.accelerators:
            raise RecipeError(
                f"cluster.groups: {group.name}: a server over {width} accelerators (tensor_parallel) does not cover whole nodes: "
                f"{node.name} has {node.accelerators}",
                mend=f"set tensor_parallel to at most {node.accelerators}, or to a multiple of it",
            )
        span = width // node.accelerators
        part = nodes[at : at + span]
        if len(part) < span or any(n.accelerators != node.accelerators or n.kind != node.kind for n in part):
            raise RecipeError(
                f"cluster.groups: {group.name}: a server over {width} accelerators (tensor_parallel) needs {span} equal nodes from {node.name} on, "
                f"there are {sum(1 for n in part if n.accelerators == node.accelerators and n.kind == node.kind)}",
                mend=f"give the group a multiple of {span} inference nodes of the same kind, or set tensor_parallel={node.accelerators}",
            )
        found.append(ServerSpot(group.name, len(found), tuple(part), width, 0, group.port, recipe.cluster.server_rendezvous_port))
        at += span
    return found


def _machine(node: Node) -> str:
    """What nodes of one machine share: their address, and all loopback addresses are this machine's."""
    return LOOPBACK[0] if node.address.startswith(LOOPBACK) else node.address


def _ports(recipe: Recipe, servers: list[ServerSpot], trainers: list[TrainerSpot], master: Node | None) -> list[tuple[str, int, str, str]]:
    listeners = [(s.nodes[0].name, s.port, f"server {s.name}", "cluster.groups: port") for s in servers]
    spread = [s for s in servers if s.rendezvous]
    listeners += [(s.nodes[0].name, s.rendezvous, f"rendezvous of server {s.name}", "cluster.server_rendezvous_port") for s in spread]
    if sum(t.processes for t in trainers) > 1:
        listeners.append((trainers[0].node.name, recipe.cluster.rendezvous_port, "rendezvous of the trainers", "cluster.rendezvous_port"))
    if master is not None:
        port, setting = recipe.hidden.mooncake.port, "hidden.mooncake.port"
        listeners += [(master.name, port, "Mooncake master", setting), (master.name, port + 1, "metrics of the Mooncake master", setting)]
    metrics = [(t, port) for t in trainers for port in trainer_ports(recipe, t.processes)]
    return [*listeners, *((t.node.name, port, f"metrics of trainer {t.name}", "watch.metrics_port") for t, port in metrics)]


def trainer_ports(recipe: Recipe, processes: int) -> list[int]:
    """Ports at which the trainers of a node show their metrics; none without `watch.metrics_port`."""
    first = recipe.watch.metrics_port
    return [] if first is None else list(range(first, first + processes))


def _once(names: list[str], setting: str) -> None:
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise RecipeError(f"{setting} has {twice!r} twice", mend="give each a name of its own")


def _check_names(group: str, role: str, names: list[str], known: dict[str, Node]) -> None:
    if not names:
        what = "trains" if role == "training" else "captures states"
        raise RecipeError(f"cluster.groups: {group} has no {role} node: nobody {what} there", mend=f"name one in {role}, or join the group with another")
    _once(names, f"cluster.groups: {group}.{role}")
    lost = next((n for n in names if n not in known), None)
    if lost is not None:
        raise RecipeError(f"cluster.groups: {group}.{role} names {lost!r}, which is not among cluster.nodes", mend=f"nodes: {', '.join(known)}")


def _check_owned(group: Group, used: dict[str, str]) -> None:
    for name in dict.fromkeys([*group.inference, *group.training]):
        if name in used:
            raise RecipeError(
                f"node {name} is in the groups {used[name]} and {group.name}",
                mend="a node belongs to one group: make two of it in cluster.nodes, with one address, each with its part of the accelerators",
            )
        used[name] = group.name
