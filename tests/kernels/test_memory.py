"""Mapping large blocks one by one: freed memory goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from firesteel.kernels.memory import map_large_blocks, use_huge_pages
use_huge_pages()
mapped = sys.argv[1] == "mapped" and map_large_blocks()
import torch
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) >> 10
warm = [torch.ones(6 << 20) for _ in range(2)]  # a freed block of 24 MB teaches glibc to keep such blocks in its heap
del warm
before, kept = resident(), []
for _ in range(8):
    large = torch.ones(4 << 20)  # 16 MB, freed, below a small block that stays
    kept.append([torch.ones(1 << 16) for _ in range(4)])
    more = torch.ones(5 << 20)
    del large, more
print(int(mapped), resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_blocks_do_not_stay() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, "mapped"], capture_output=True, text=True, check=True)
    mapped, grown = map(int, run.stdout.split())
    if not mapped:
        pytest.skip("this C library has no mallopt")
    assert grown < 16 + 12  # what is kept is 8 MB
