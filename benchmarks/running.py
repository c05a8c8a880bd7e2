"""What the benchmarks that start servers share: a free port, a Mooncake master, quantiles, the facts of a run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ports import free_port

from firesteel.artifact import package_versions
from firesteel.evaluation.machine import machine_facts
from firesteel.target.server import last_words, master_command

MIB = 1 << 20


class Master:
    """A Mooncake master on this machine, which can be killed and started again at the same port. A context manager."""

    def __init__(self, log: Path) -> None:
        self.log, self.port = log, free_port(2)
        self._command = master_command(sys.executable, self.port)
        if not Path(self._command[0]).is_file():
            raise SystemExit(f"there is no {self._command[0]}: pip install 'firesteel[mooncake]'")
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        for _ in range(200):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None:
                raise SystemExit("the Mooncake master ended: {}; {}".format(*last_words(self.log)))
            time.sleep(0.05)
        raise SystemExit(f"the Mooncake master does not answer; its log is {self.log}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    return {"median": float(np.median(values)), "p95": float(np.quantile(values, 0.95))}


def facts() -> dict[str, Any]:
    """What every result says of where it comes from."""
    machine = machine_facts(accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    return {"versions": package_versions(), "machine": machine.model_dump(), "threads": torch.get_num_threads(), "load_average": os.getloadavg()}
