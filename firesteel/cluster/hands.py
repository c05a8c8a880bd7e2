"""How a command gets onto a node: as a local process, or through the OpenSSH client."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from firesteel.cluster.process import Process
from firesteel.errors import ResourceError
from firesteel.recipe import Cluster, Node

_UNREACHABLE = 255  # of ssh itself; a remote program's own 255 cannot be told from it


def work_folder(cluster: Cluster) -> str | None:
    """Where `ssh` starts processes: here if `cluster.shared` holds this folder, so that relative paths mean the same, else in that; None: as it is."""
    if cluster.shared is None:
        return None
    here, shared = Path.cwd(), Path(cluster.shared)
    return str(here if here.is_relative_to(shared) else shared)


class Hands(Protocol):
    """Puts commands on nodes."""

    def command(self, process: Process) -> list[str]:
        """What is run here so that the process runs there."""

    def env(self, process: Process) -> Mapping[str, str]:
        """What is added to the environment of that command."""

    def ask(self, node: Node, argv: Sequence[str]) -> str:
        """Run something short on a node; its output. Raises `ResourceError`."""


class Local:
    """All nodes are this machine."""

    def __init__(self, cluster: Cluster) -> None:
        self.timeout = cluster.connect_timeout

    def command(self, process: Process) -> list[str]:
        return list(process.argv)

    def env(self, process: Process) -> Mapping[str, str]:
        return process.env

    def ask(self, node: Node, argv: Sequence[str]) -> str:
        return _ask(node, list(argv), 4 * self.timeout)


class Ssh:
    """Each node by its address; the user's own configuration of ssh holds, and nothing is asked of a terminal.

    Args:
        python: Firesteel's Python on the nodes.
        folder: working folder there, or None.
    """

    def __init__(self, cluster: Cluster, python: str, folder: str | None) -> None:
        self.timeout, self.python, self.folder = cluster.connect_timeout, python, folder
        alive = ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
        self._ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={round(cluster.connect_timeout)}", *alive, *cluster.ssh_options]

    def command(self, process: Process) -> list[str]:
        # An interrupt lets a trainer save its state; a server has nothing to save.
        task = {"argv": process.argv, "env": dict(process.env), "folder": self.folder, "signal": "SIGINT" if process.role == "trainer" else "SIGTERM"}
        return [*self._ssh, process.node.address, shlex.join([self.python, "-m", "firesteel.cluster.remote", json.dumps(task)])]

    def env(self, process: Process) -> Mapping[str, str]:
        return {}

    def ask(self, node: Node, argv: Sequence[str]) -> str:
        return _ask(node, [*self._ssh, node.address, shlex.join(argv)], 4 * self.timeout)


def _ask(node: Node, command: list[str], timeout: float) -> str:
    how = f"node {node.name} ({node.address})"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ResourceError(f"{how} did not answer within {timeout:g} s", mend="is it up? cluster.nodes: address, cluster.connect_timeout") from None
    except OSError as e:
        raise ResourceError(f"{how}: {command[0]} cannot be started: {e.strerror}", mend="install it, or correct cluster.python or target.vllm.python") from e
    if done.returncode == 0:
        return done.stdout
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if command[0] == "ssh" and done.returncode == _UNREACHABLE:
        raise ResourceError(f"{how} cannot be reached by ssh: {last}", mend=f"try `ssh {node.address} true`; cluster.nodes: address, cluster.ssh_options")
    raise ResourceError(f"{how}: {' '.join(command[-3:])[:80]} ended with code {done.returncode}: {last}", mend="is Firesteel (or vLLM) installed there?")
