"""A real Mooncake over TCP on this machine: objects, a full store that still says so, a master that is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from firesteel.errors import ResourceError
from firesteel.hidden.exchange import Leases, Marker, MooncakeExchange
from firesteel.hidden.mooncake import MooncakeSettings

pytestmark = pytest.mark.mooncake

MASTER = Path(sys.executable).parent / "mooncake_master"
MIB = 1 << 20


def start_master() -> tuple[subprocess.Popen[bytes], str]:
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed: pip install 'firesteel[mooncake]'", exc_type=ImportError)
    ports = []
    for _ in range(2):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            ports.append(s.getsockname()[1])
    command = [str(MASTER), f"-rpc_port={ports[0]}", f"-metrics_port={ports[1]}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(100):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", ports[0])) == 0:
                break
        time.sleep(0.05)
    return process, f"127.0.0.1:{ports[0]}"


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[MooncakeExchange, MooncakeExchange]]:
    """A server's end, which lends 16 MiB, and a trainer's, which lends none."""
    process, master = start_master()
    lender = MooncakeExchange(MooncakeSettings(master, segment=16 * MIB, buffer=8 * MIB))
    reader = MooncakeExchange(MooncakeSettings(master, buffer=8 * MIB))
    yield lender, reader
    reader.close()
    lender.close()
    process.kill()
    process.wait()


def test_what_is_put_is_got_and_removed_at_once(ends: tuple[MooncakeExchange, MooncakeExchange]) -> None:
    lender, reader = ends
    data = os.urandom(3 * MIB)
    assert reader.look("a") is None
    assert reader.take("a") is None
    lender.put("a", data)
    assert reader.look("a") == Marker(len(data))
    assert reader.get("a") == data
    assert reader.take("a") == (Marker(len(data)), data)
    lender.fail("lost", "no room", again=True)
    assert reader.take("lost") == (Marker(0, "no room", True), b"")
    reader.remove("lost")
    assert reader.look("lost") is None
    reader.remove("a")  # although the get has just begun a lease
    assert reader.look("a") is None
    for i in range(30):  # room is given back
        lender.put(f"b{i}", data)
        reader.remove(f"b{i}")


def test_a_full_store_drops_nothing_refuses_and_says_so(ends: tuple[MooncakeExchange, MooncakeExchange]) -> None:
    lender, reader = ends
    sizes = [4 * MIB] * 9 + [MIB] * 9 + [MIB // 16] * 99 + [MIB // 256] * 999 + [64] * 9999
    held = []
    for size in sizes:
        try:
            lender.store.put(f"filler{len(held)}", bytes(size))
            held.append(f"filler{len(held)}")
        except ResourceError as e:
            assert "full" in e.message  # noqa: PT017 - whether one fits is not the question
    with pytest.raises(ResourceError, match="the Mooncake store is full: no room for 1048576 bytes"):
        lender.put("late", bytes(MIB))
    for i in range(20):
        lender.fail(f"said{i}", "the store is full", again=True)
        assert reader.look(f"said{i}") == Marker(error="the store is full", again=True)
        reader.remove(f"said{i}")
    assert all(reader.store.get(key) is not None for key in held[:5]), "what was there first is still there"
    for key in held:
        reader.store.remove(key)
    lender.put("late", bytes(MIB))
    reader.remove("late")


def test_leases_end_in_a_store_as_in_a_folder(ends: tuple[MooncakeExchange, MooncakeExchange]) -> None:
    lender, reader = ends
    leases = Leases(lender, 0.05)
    lender.put("old", b"x")
    leases.add("old")
    deadline = time.monotonic() + 10
    while reader.look("old") is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lender.put("late", b"x")
    leases.add("late")
    leases.close(grace=0)
    assert reader.look("late") is None


def test_a_master_that_is_gone_is_said_at_once() -> None:
    process, master = start_master()
    end = MooncakeExchange(MooncakeSettings(master, segment=16 * MIB, buffer=8 * MIB))
    process.kill()
    process.wait()
    started = time.monotonic()
    with pytest.raises(ResourceError, match="does not answer"):
        end.look("a")
    with pytest.raises(ResourceError, match="did not take"):
        end.put("a", b"x")
    assert time.monotonic() - started < 5
    with pytest.raises(ResourceError, match="no Mooncake master answers"):
        MooncakeExchange(MooncakeSettings(master))
