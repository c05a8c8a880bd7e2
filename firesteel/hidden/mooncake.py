"""A Mooncake store: one machine lends memory, another fetches from it, over TCP or RDMA. Imported inside vLLM: no training code here."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from firesteel.errors import MOONCAKE_LIBRARIES, ResourceError

_FULL = -200
_AGAIN = 0.1  # seconds after which what could not be fetched is tried once more
_INSTALL = f"pip install 'firesteel[mooncake]' (machines with CUDA: mooncake-transfer-engine); {MOONCAKE_LIBRARIES}"


@dataclass(frozen=True)
class MooncakeSettings:
    """How to join a store.

    Attributes:
        master: HOST:PORT of its master.
        protocol: `tcp` or `rdma`.
        device: RDMA devices, comma-separated; empty lets Mooncake choose.
        address: this machine's, as others reach it.
        segment: bytes that this process lends for objects; 0 for one that only fetches.
        buffer: bytes for transfers; holds the largest object.
    """

    master: str
    protocol: str = "tcp"
    device: str = ""
    address: str = "127.0.0.1"
    segment: int = 0
    buffer: int = 512 << 20


def check_master(master: str, *, timeout: float = 3.0) -> None:
    """Whether somebody listens at HOST:PORT: Mooncake itself would try for a minute and a half.

    Raises:
        ResourceError: nobody does.
    """
    host, _, port = master.rpartition(":")
    try:
        if not host or not port.isdigit():
            raise ResourceError(f"hidden.mooncake.master={master!r} is not HOST:PORT")
        socket.create_connection((host, int(port)), timeout=timeout).close()
    except OSError as e:
        raise ResourceError(
            f"no Mooncake master answers at {master}: {e.strerror or e}",
            mend="start the server first (firesteel extract-server), or set hidden.mooncake.master",
        ) from None


class MooncakeStore:
    """Objects by key. Objects are pinned: a full store refuses new ones instead of dropping old ones."""

    def __init__(self, settings: MooncakeSettings) -> None:
        """Join.

        Raises:
            ResourceError: Mooncake is not installed, or its master cannot be reached.
        """
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as e:
            raise ResourceError(f"hidden.transport=mooncake, but Mooncake cannot be imported: {e}", mend=_INSTALL) from None
        check_master(settings.master)
        # With several interfaces Mooncake may otherwise announce one that others do not reach.
        os.environ["MC_TCP_BIND_ADDRESS"] = settings.address
        self.settings = settings
        self._store: Any = MooncakeDistributedStore()
        # "P2PHANDSHAKE": no metadata server beside the master.
        code = self._store.setup(settings.address, "P2PHANDSHAKE", settings.segment, settings.buffer, settings.protocol, settings.device, settings.master)
        if code != 0:
            raise ResourceError(
                f"Mooncake cannot join the store of {settings.master} at {settings.address} over {settings.protocol} (code {code})",
                mend="check hidden.mooncake.address, protocol and device, and that segment_gb and buffer_gb fit into memory",
            )
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        """Store an object; the key must be new.

        Raises:
            ResourceError: the store is full, or the transfer failed.
        """
        code = self._store.put(key, data, self._pinned)
        if code == _FULL:
            raise ResourceError(
                f"the Mooncake store is full: no room for {len(data)} bytes",
                mend="fewer requests at a time (hidden.feed.concurrency), or a larger hidden.mooncake.segment_gb",
            )
        if code != 0:
            raise ResourceError(
                f"Mooncake did not take {len(data)} bytes (code {code})", mend="look at the master's log; hidden.mooncake.buffer_gb must hold a sample"
            )

    def get(self, key: str) -> bytes | None:
        """An object's bytes, or None where it is not there.

        Raises:
            ResourceError: the master does not answer, or the machine that has the object cannot be reached.
        """
        for again in (True, False):
            # Asked for first, because a get of what is not there writes a warning each time; once more after a failure: it may have been removed just then.
            if not self._has(key):
                return None
            found: bytes = self._store.get(key)
            if found:
                return found
            if again:
                time.sleep(_AGAIN)
        if not self._has(key):
            return None
        s = self.settings
        raise ResourceError(
            f"the Mooncake master at {s.master} knows {key}, but the machine that holds it does not give it to this one ({s.address}, {s.protocol})",
            mend="set hidden.mooncake.address on each machine, server and trainer, to the address that the other one reaches",
        )

    def get_together(self, keys: Sequence[str]) -> list[bytes] | None:
        """Several objects at once, empty where one is not to be had; None where the first is not there.

        Raises:
            ResourceError: the master does not answer.
        """
        return list(self._store.get_batch(list(keys))) if self._has(keys[0]) else None

    def _has(self, key: str) -> bool:
        there: int = self._store.is_exist(key)
        if there < 0:
            raise ResourceError(
                f"the Mooncake master at {self.settings.master} does not answer (code {there})", mend="look at its log, and start the server again"
            )
        return there > 0

    def remove(self, key: str) -> None:
        """Delete an object, whether or not a reader's lease runs on it."""
        self._store.remove(key, True)

    def remove_all(self, keys: Sequence[str]) -> None:
        """The same for several, in one trip."""
        self._store.batch_remove(list(keys), True)

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None


_joined: dict[MooncakeSettings, tuple[MooncakeStore, int]] = {}  # and how many have it
_joining = threading.Lock()


def join_store(settings: MooncakeSettings) -> MooncakeStore:
    """The store of these settings that this process is in, or else joins now: each client costs a buffer and a connection to every other machine.

    Raises:
        ResourceError: as `MooncakeStore`.
    """
    with _joining:
        store, users = _joined.get(settings) or (MooncakeStore(settings), 0)
        _joined[settings] = store, users + 1
        return store


def leave_store(store: MooncakeStore) -> None:
    """One user of `join_store` less; the last one closes it."""
    with _joining:
        _, users = _joined[store.settings]
        if users > 1:
            _joined[store.settings] = store, users - 1
            return
        del _joined[store.settings]
        store.close()
