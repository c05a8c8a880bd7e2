"""Large blocks straight from the system: less memory at the peak of a training step with a large vocabulary.

A step allocates and frees blocks of tens of megabytes among small ones. glibc keeps them in its heap, which then cannot shrink and
grows step by step (by half, measured at a vocabulary of 49,152). Mapped one by one they go back at once; with huge pages that
costs some 5% of the time, without a fifth.
"""

from __future__ import annotations

import ctypes
import os
import sys

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
