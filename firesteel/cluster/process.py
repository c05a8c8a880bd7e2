"""A process of a run, and how it is typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from firesteel.cluster.topology import Topology
from firesteel.errors import TrainingError
from firesteel.recipe import Node

Role = Literal["master", "server", "trainer"]
# What stands for a node's address until a shell variable does (Slurm decides where nodes are).
_UNKNOWN = re.compile(r"@([a-z0-9-]+)@")


@dataclass(frozen=True)
class Process:
    """What is to be started on a node.

    Attributes:
        name: also of its log.
        argv: program and arguments.
        env: added to the node's own.
        health: URL that answers 200 once it is ready; None: nothing to wait for.
        accelerators: that it uses on its node.
        ports: at which it listens there.
    """

    name: str
    role: Role
    node: Node
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    health: str | None = None
    accelerators: int = 0
    ports: tuple[int, ...] = ()

    def shell(self) -> str:
        """As a user would type it on the node."""
        return " ".join([*(f"{k}={quote(v)}" for k, v in self.env.items()), *map(quote, self.argv)])


def unknown_address(node: str) -> str:
    """Stands for the address of a node that only the shell will know, as `$NODE_name`."""
    return f"@{node}@"


def variable(node: str) -> str:
    """The shell variable that holds a node's address."""
    return "NODE_" + node.upper().replace("-", "_")


def quote(word: str) -> str:
    """A word for a shell; unknown addresses become variables in it."""
    parts = _UNKNOWN.split(word)
    if len(parts) == 1:
        return shlex.quote(word)
    return "".join(f'"${{{variable(p)}}}"' if i % 2 else shlex.quote(p) if p else "" for i, p in enumerate(parts))


def blocks(topology: Topology, processes: Sequence[Process]) -> Iterator[str]:
    """Every command, a block a node, in the order in which they are started there."""
    for node in topology.nodes:
        mine = [p for p in processes if p.node == node]
        yield f"# node {node.name} ({node.address}, {node.accelerators} x {node.kind})" + ("" if mine else ": nothing")
        for process in mine:
            yield f"# {process.name}"
            yield process.shell()
        yield ""


def check_startable(topology: Topology, verb: str) -> None:
    """Refuse what the trainer cannot do; planning and printing go on.

    Args:
        verb: `cluster.verb`.

    Raises:
        TrainingError: several trainer processes would walk the whole line, which is one process's work.
    """
    if topology.world_size > 1 and verb == "run":
        raise TrainingError(
            f"this cluster has {topology.world_size} trainer processes, and `firesteel {verb}` is the work of one",
            mend="launch with cluster.verb=extract, then with cluster.verb=train; or name one training node and set cluster.trainers_per_node=1",
        )
