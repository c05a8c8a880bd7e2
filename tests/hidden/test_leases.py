"""What nobody fetched is deleted after the lease, with or without later samples, whatever fails, and by no other machine's clock."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

from firesteel.hidden.exchange import FolderExchange, Leases


class Counting(FolderExchange):
    """Counts deletions; those of handles in `stuck` fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.removed: Counter[str] = Counter()
        self.stuck: set[str] = set()

    def remove(self, handle: str) -> None:
        self.removed[handle] += 1
        if handle in self.stuck:
            raise PermissionError("read-only")
        super().remove(handle)


def handles(folder: Path) -> list[str]:
    return sorted(p.stem for p in folder.glob("*.states"))


def test_each_lease_ends_by_the_clock_and_a_deletion_that_fails_is_tried_a_lease_later(tmp_path: Path) -> None:
    now = [1000.0]
    exchange = Counting(tmp_path)
    leases = Leases(exchange, 900.0, clock=lambda: now[0])
    for at, handle in ((1000.0, "a"), (1000.0, "stuck"), (1000.0, "fetched"), (1500.0, "b")):
        now[0] = at
        exchange.put(handle, b"x")
        leases.add(handle)
    exchange.stuck = {"stuck"}
    FolderExchange(tmp_path).remove("fetched")
    for at, left in ((1899.0, ["a", "b", "stuck"]), (1900.0, ["b", "stuck"]), (2399.0, ["b", "stuck"]), (2400.0, ["stuck"]), (2799.0, ["stuck"])):
        now[0] = at
        leases.sweep()
        assert handles(tmp_path) == left, at
    exchange.stuck = set()
    now[0] = 2800.0
    leases.sweep()
    assert handles(tmp_path) == []
    assert exchange.removed == {"a": 1, "b": 1, "fetched": 1, "stuck": 2}
    exchange.put("last", b"x")
    leases.add("last")
    leases.close(grace=0.0)
    assert handles(tmp_path) == []


def test_nothing_need_follow_for_a_lease_to_end(tmp_path: Path) -> None:
    exchange, others = FolderExchange(tmp_path), set(threading.enumerate())
    leases = Leases(exchange, 0.1)
    exchange.put("a", b"x")
    leases.add("a")
    assert handles(tmp_path) == ["a"]
    deadline = time.monotonic() + 10
    while handles(tmp_path):
        assert time.monotonic() < deadline, "the only sample is not deleted"
        time.sleep(0.01)
    leases.close()
    assert not set(threading.enumerate()) - others


def test_writers_side_by_side_delete_each_handle_once(tmp_path: Path) -> None:
    exchange = Counting(tmp_path)
    leases = Leases(exchange, 0.0)

    def write(name: str) -> None:
        for i in range(300):
            leases.add(f"{name}{i}")
            leases.sweep()

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    leases.close(grace=0.0)
    assert len(exchange.removed) == 1200
    assert set(exchange.removed.values()) == {1}
