"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from firesteel.evaluation.schema import Machine


def machine_facts(*, accelerator: str | None) -> Machine:
    """CPU model, usable cores, memory and system of this machine.

    Args:
        accelerator: name of the device the models ran on if it is not the CPU, else None.
    """
    return Machine(
        cpu=_cpu_model(Path("/proc/cpuinfo")) or platform.processor() or platform.machine() or "unknown",
        cores=usable_cores(),
        memory_gb=_memory_gb(),
        accelerator=accelerator,
        system=f"{platform.system()} {platform.release()}",
    )


def _cpu_model(info: Path) -> str | None:
    try:
        text = info.read_text(errors="replace")
    except OSError:  # not Linux
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return None


def usable_cores() -> int:
    """Cores that this process may use."""
    # Affinity, not the machine's count: a container or `taskset` may allow fewer. macOS has no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, OSError, ValueError):
        return None
