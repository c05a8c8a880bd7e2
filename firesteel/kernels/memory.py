"""What memory there is; and large blocks straight from the system: less memory at the peak of a training step with a large vocabulary.

A step allocates and frees blocks of tens of megabytes among small ones. glibc keeps them in its heap, which then cannot shrink and
grows step by step (by half, measured at a vocabulary of 49,152). Mapped one by one they go back at once; with huge pages that
costs some 5% of the time, without a fifth.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_M_MMAP_THRESHOLD = -3  # malloc.h
_THRESHOLD = 1 << 20
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def use_huge_pages() -> None:
    """Let PyTorch ask for huge pages for large CPU tensors; it looks once, so this has to come before the first tensor."""
    os.environ.setdefault(_HUGE_PAGES, "1")


def map_large_blocks() -> bool:
    """From now on, map blocks of a megabyte or more one by one. Returns whether the C library could be told (glibc only)."""
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD))
    except (OSError, AttributeError):
        return False


def free_memory() -> int | None:
    """Bytes that a process may still take without driving others out: of the machine, and of the container that it is in. None where nobody tells."""
    found = []
    try:
        table = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(table["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(kept["inactive_file"])
        found.append(max(0, int((group / "memory.max").read_text()) - used))  # "max" where there is no limit
    except (OSError, KeyError, ValueError):
        pass
    return min(found, default=None)


def holds_again(tensors: Iterable[Any]) -> bool:
    """Whether these tensors fit into memory once more, with some room to spare (True where the system does not tell)."""
    free = free_memory()
    return free is None or free > 1.2 * sum(t.numel() * t.element_size() for t in tensors)
