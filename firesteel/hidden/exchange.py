"""Where samples wait between a vLLM server and the trainer: a folder that both see, or Mooncake.

A handle's data comes first, its marker last: who sees a marker `ok` finds whole data. A failure leaves a marker, too, so that nobody
waits in vain. What nobody fetched is deleted by its writer after the lease. Imported inside vLLM: no training code here.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from firesteel.errors import HiddenStateError, ResourceError
from firesteel.hidden.mooncake import MooncakeSettings, join_store, leave_store

_KEPT_BACK, _LONGEST_ERROR = 64, 1024  # markers that find room in a full store, and characters of one


@dataclass(frozen=True)
class Marker:
    """What a writer says of a handle: `size` bytes lie there, or why they do not and whether another try may help."""

    size: int = 0
    error: str | None = None
    again: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def _read_marker(data: bytes) -> Marker:
    try:
        return Marker(**json.loads(data))
    except (ValueError, TypeError) as e:
        return Marker(error=f"its marker is damaged: {e}", again=True)


class Exchange(Protocol):
    """Bytes by handle, written once, read once."""

    def put(self, handle: str, data: bytes) -> None:
        """Leave data, then the marker.

        Raises:
            ResourceError: there is no room, or nobody answers.
        """

    def fail(self, handle: str, error: str, *, again: bool) -> None:
        """Leave a marker that says why there is no data."""

    def look(self, handle: str) -> Marker | None:
        """The marker, if it is there.

        Raises:
            ResourceError: nobody answers, or the machine that holds it cannot be reached.
        """

    def get(self, handle: str) -> bytes:
        """The data of a handle whose marker was seen.

        Raises:
            HiddenStateError: it is not there.
        """

    def remove(self, handle: str) -> None:
        """Delete data and marker; nothing happens where there are none."""

    def close(self) -> None: ...


class FolderExchange:
    """Files in a folder: `HANDLE.states`, `HANDLE.json`. Both appear by rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ResourceError(f"cannot make the folder {folder}: {e.strerror}", mend="set hidden.exchange to a folder that server and trainer share") from e

    def put(self, handle: str, data: bytes) -> None:
        self._write(f"{handle}.states", data)
        self._write(f"{handle}.json", Marker(len(data)).to_bytes())

    def fail(self, handle: str, error: str, *, again: bool) -> None:
        self._write(f"{handle}.json", Marker(error=error, again=again).to_bytes())

    def look(self, handle: str) -> Marker | None:
        try:
            return _read_marker((self.folder / f"{handle}.json").read_bytes())
        except FileNotFoundError:
            return None

    def get(self, handle: str) -> bytes:
        try:
            return (self.folder / f"{handle}.states").read_bytes()
        except OSError as e:
            raise HiddenStateError(f"sample {handle} cannot be read: {e}", mend="is hidden.exchange the same folder on both machines?") from None

    def remove(self, handle: str) -> None:
        for name in (f"{handle}.json", f"{handle}.states"):
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        pass

    def _write(self, name: str, data: bytes) -> None:
        # No fsync: after a crash of the machine the sample is asked for again.
        temporary = self.folder / f".{name}.tmp"
        try:
            temporary.write_bytes(data)
            temporary.replace(self.folder / name)
        except OSError as e:
            temporary.unlink(missing_ok=True)
            raise ResourceError(f"cannot write {self.folder / name}: {e.strerror}", mend="free some space, or set hidden.exchange=ANOTHER_FOLDER") from e


class MooncakeExchange:
    """Objects `HANDLE/states` and `HANDLE/marker` in a Mooncake store, pinned until they are removed.

    Whoever lends memory keeps a little of it back, so that a marker finds room in a full store to say that it is full.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self.store, self._left = join_store(settings), False
        self._lends, self._mine, self._kept_back, self._lock = settings.segment > 0, secrets.token_hex(6), list[str](), threading.Lock()
        self._number = 0
        self._keep_back()

    def put(self, handle: str, data: bytes) -> None:
        self.store.put(f"{handle}/states", data)
        try:
            self._mark(handle, Marker(len(data)))
        except ResourceError:
            self.store.remove(f"{handle}/states")
            raise
        self._keep_back()

    def fail(self, handle: str, error: str, *, again: bool) -> None:
        self._mark(handle, Marker(error=error[:_LONGEST_ERROR], again=again))

    def _mark(self, handle: str, marker: Marker) -> None:
        while True:
            try:
                return self.store.put(f"{handle}/marker", marker.to_bytes())
            except ResourceError:
                with self._lock:
                    if not self._kept_back:
                        raise
                    self.store.remove(self._kept_back.pop())

    def _keep_back(self) -> None:
        """Hold room for markers, as far as there is any."""
        with self._lock, contextlib.suppress(ResourceError):
            while self._lends and len(self._kept_back) < _KEPT_BACK:
                key = f"room-{self._mine}-{self._number}"
                self.store.put(key, bytes(2 * _LONGEST_ERROR))
                self._kept_back.append(key)
                self._number += 1

    def look(self, handle: str) -> Marker | None:
        found = self.store.get(f"{handle}/marker")
        return None if found is None else _read_marker(found)

    def get(self, handle: str) -> bytes:
        found = self.store.get(f"{handle}/states")
        if found is None:
            raise HiddenStateError(f"sample {handle} was deleted before it was fetched", mend="set hidden.lease to more seconds")
        return found

    def remove(self, handle: str) -> None:
        for name in ("marker", "states"):
            self.store.remove(f"{handle}/{name}")

    def close(self) -> None:
        """Leave the store; it is closed when nobody in this process uses it any more. May be called twice."""
        if not self._left:
            self._left = True
            leave_store(self.store)


def open_exchange(config: Mapping[str, Any]) -> Exchange:
    """The exchange that a plain mapping describes: `{"folder": PATH}` or `{"mooncake": {...}}`. Exchanges of the same settings share one client.

    Raises:
        ResourceError: the folder cannot be made, the master cannot be reached, or Mooncake is not installed.
    """
    if "folder" in config:
        return FolderExchange(Path(config["folder"]))
    return MooncakeExchange(MooncakeSettings(**config["mooncake"]))


class Leases:
    """Deletes what a writer left and nobody fetched within the lease. Handles that were fetched are gone already: deleting does nothing."""

    def __init__(self, exchange: Exchange, seconds: float) -> None:
        self.exchange, self.seconds = exchange, seconds
        self._left: deque[tuple[float, str]] = deque()

    def add(self, handle: str) -> None:
        """A handle was left now; earlier ones that ran out are deleted."""
        now = time.monotonic()
        self._left.append((now, handle))
        while self._left and now - self._left[0][0] > self.seconds:
            self.exchange.remove(self._left.popleft()[1])
