"""Several machines on one: network namespaces joined by a bridge, each with an address of its own, and an `ssh` that goes into them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster_fakes import program

# Drops its own options, looks up the namespace of an address, and runs the rest there. A host's environment may differ: FAKE_ENV_10_77_0_2="A=1".
_SSH = """#!{python}
import os, sys
args = sys.argv[1:]
while args[0].startswith("-"):
    args = args[2:] if args[0] in ("-o", "-l", "-p") else args[1:]
names = dict(pair.split("=") for pair in {names!r}.split())
env = dict(os.environ)
for pair in env.pop("FAKE_ENV_" + args[0].replace(".", "_"), "").split():
    name, _, value = pair.partition("=")
    env[name] = value
os.execvpe("ip", ["ip", "netns", "exec", names[args[0]], "sh", "-c", " ".join(args[1:])], env)
"""


def why_not() -> str | None:
    """Why machines cannot be made here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    try:
        with Hosts(["probe"]) as hosts:
            hosts.throttle("probe", "8mbit")
    except (OSError, subprocess.CalledProcessError) as e:
        return f"network namespaces cannot be made here (they need iproute2, bridge, veth and tbf): {getattr(e, 'stderr', '') or e}"
    return None


class Hosts:
    """A context manager. The machines are there until it is left, and all their processes end then."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self._id = list(names), f"fs{os.getpid() % 100000}"
        self._switch = f"{self._id}-switch"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for name in self.names:
            space = self.space(name)
            _run("ip", "netns", "add", space)
            _run("ip", "-n", self._switch, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", self._switch, "link", "set", f"to-{name}", "master", "br0", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", link, "up")

    def __exit__(self, *_: object) -> None:
        for space in [*map(self.space, self.names), self._switch]:
            for pid in self._pids(space):
                _kill(pid)
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def space(self, name: str) -> str:
        return f"{self._id}-{name}"

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 2}"

    def install_ssh(self, folder: Path) -> None:
        """Put an `ssh` into a folder, which is to be first on the PATH."""
        folder.mkdir(exist_ok=True)
        program(folder / "ssh", _SSH, names=" ".join(f"{self.address(n)}={self.space(n)}" for n in self.names))

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """A command on a machine."""
        return ["ip", "netns", "exec", self.space(name), *argv]

    def cut(self, name: str) -> None:
        """Pull a machine's plug out of the switch."""
        _run("ip", "-n", self._switch, "link", "set", f"to-{name}", "down")

    def heal(self, name: str) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"to-{name}", "up")

    def throttle(self, name: str, rate: str) -> None:
        """Bound what a machine sends, such as `8mbit`."""
        _run("tc", "-n", self.space(name), "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")

    def kill(self, name: str, word: str, but: str = "torch.distributed.run") -> int:
        """Kill the processes of a machine whose command has this word, and not the other or the remote end's, none of them politely; how many there were."""
        commands = {pid: _command(pid) for pid in self._pids(self.space(name))}
        found = [pid for pid, command in commands.items() if word in command and but not in command and "firesteel.cluster.remote" not in command]
        for pid in found:
            _kill(pid)
        return len(found)

    def _pids(self, space: str) -> list[int]:
        try:
            done = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
        except OSError:
            return []
        return [int(word) for word in done.stdout.split()]


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
