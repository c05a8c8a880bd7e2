"""The worker side of a step benchmark: commands on stdin, one JSON object per line on stdout. Needs PyTorch and nothing else.

Two workers, each in an environment of its own, hold a model each and are driven in turn, so that both meet the same machine.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

_STATUS, _RESET = "/proc/self/status", "/proc/self/clear_refs"


def serve(commands: dict[str, Callable[[str], dict[str, Any]]], about: dict[str, Any]) -> None:
    """Answer `NAME ARGUMENT` lines by `commands[NAME](ARGUMENT)` until `quit` or end of input.

    The first line out is `about` with `ready: true`. Whatever else writes to stdout lands on stderr.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    print(json.dumps({"ready": True, "threads": torch.get_num_threads(), **about}), file=out)
    for line in sys.stdin:
        name, _, argument = line.strip().partition(" ")
        if name == "quit":
            return
        print(json.dumps(commands[name](argument)), file=out)


class MemoryMeter:
    """Peak resident memory from the moment it is made: the kernel's own high-water mark where it can be reset, beside samples every 5 ms.

    The high-water mark misses nothing; samples are what is left where /proc cannot be written. `ru_maxrss` is the mark
    over the whole life of the process, loading included, and is given for comparison.
    """

    def __init__(self) -> None:
        self.base = rss()
        self._sampled = self.base
        self._marked = _reset_mark()
        threading.Thread(target=self._watch, daemon=True).start()

    def read(self) -> dict[str, int]:
        """Bytes: base, peak since then, peak of the samples alone, peak over the process's life."""
        peak = max(self._sampled, _mark() if self._marked else 0)
        return {"base_rss": self.base, "peak_rss": peak, "sampled_rss": self._sampled, "ru_maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def _watch(self) -> None:
        while True:
            self._sampled = max(self._sampled, rss())
            time.sleep(0.005)


def rss() -> int:
    """Resident bytes of this process now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _reset_mark() -> bool:
    try:
        with open(_RESET, "w") as f:
            f.write("5")
    except OSError:
        return False
    return True


def _mark() -> int:
    with open(_STATUS) as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
