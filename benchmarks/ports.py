"""Ports for servers that tests and benchmarks start."""

from __future__ import annotations

import random
import socket

# Below what Linux hands out by itself (32768 and up): no connection of another process takes one between the choice and the server's start,
# nor keeps it busy for a minute after it was closed.
_CHOICE = range(20000, 32000)


def free_port(count: int = 1) -> int:
    """The first of `count` ports in a row that nobody has at any address of this machine now."""
    draw = random.SystemRandom()  # not the seeded one: processes that run beside each other must differ
    while True:
        first = draw.choice(_CHOICE)
        if all(_free(port) for port in range(first, first + count)):
            return first


def _free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True
