"""Where samples wait between a vLLM server and the trainer: a folder that both see, or Mooncake.

A handle's data comes first, its marker last: who sees a marker `ok` finds whole data. A failure leaves a marker, too, so that nobody
waits in vain. What nobody fetched is deleted by its writer after the lease. Imported inside vLLM: no training code here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from firesteel.errors import HiddenStateError, ResourceError
from firesteel.hidden.mooncake import MooncakeSettings, join_store, leave_store

_KEPT_BACK, _LONGEST_ERROR = 64, 1024  # markers that find room in a full store, and characters of one
_GRACE, _LONG = 2.0, 3600.0  # seconds


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

    def take(self, handle: str) -> tuple[Marker, bytes] | None:
        """The marker and, unless it tells of a failure, the data, in as few trips as can be; None as long as there is no marker. Deletes nothing.

        Raises:
            ResourceError, HiddenStateError: as `look` and `get`.
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

    def take(self, handle: str) -> tuple[Marker, bytes] | None:
        marker = self.look(handle)
        if marker is None:
            return None
        return marker, b"" if marker.error is not None else self.get(handle)

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

    def take(self, handle: str) -> tuple[Marker, bytes] | None:
        # Each trip to the master and to the machine that has the object waits for a turn of a processor at every station: two trips instead of five.
        both = self.store.get_together([f"{handle}/marker", f"{handle}/states"])
        if both is None:
            return None
        said, data = both
        marker = _read_marker(said) if said else self.look(handle)
        if marker is None:
            return None
        return marker, b"" if marker.error is not None else data or self.get(handle)

    def remove(self, handle: str) -> None:
        self.store.remove_all([f"{handle}/marker", f"{handle}/states"])

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
    """Deletes what a writer left and nobody fetched within the lease, in a thread of its own. May be used by several threads.

    Handles that were fetched are gone already: deleting does nothing.

    Args:
        seconds: the lease.
        clock: seconds of this process; no other machine's clock counts.
    """

    def __init__(self, exchange: Exchange, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.exchange, self.seconds, self._clock = exchange, seconds, clock
        self._left: deque[tuple[float, str]] = deque()  # each with the time at which its lease ends
        self._news, self._ended = threading.Condition(), False
        self._thread: threading.Thread | None = None
        self._log = logging.getLogger("vllm.firesteel")

    def add(self, handle: str) -> None:
        """A handle was left now."""
        with self._news:
            self._left.append((self._clock() + self.seconds, handle))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="firesteel-leases", daemon=True)
                self._thread.start()
            self._news.notify()

    def sweep(self) -> None:
        """Delete what ran out. What cannot be deleted now is tried again a lease later."""
        ended = []
        with self._news:
            while self._left and self._left[0][0] <= self._clock():
                ended.append(self._left.popleft()[1])
        for handle in ended:
            if not self._remove(handle):
                self.add(handle)

    def close(self, grace: float = _GRACE) -> None:
        """Delete what is left. What was left within the last `grace` seconds may be on its way to its reader, who has so long to fetch it."""
        with self._news:
            self._ended = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join(_GRACE)
        now = self._clock()
        late = [handle for end, handle in self._left if end - self.seconds > now - grace]
        while self._clock() < now + grace and any(self._there(handle) for handle in late):
            time.sleep(0.02)
        give_up = self._clock() + _GRACE  # a master that is gone lets each deletion wait
        while self._left and self._clock() <= give_up:
            self._remove(self._left.popleft()[1])

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._ended and (pause := self._left[0][0] - self._clock() if self._left else _LONG) > 0:
                    self._news.wait(pause)
                if self._ended:
                    return
            self.sweep()

    def _there(self, handle: str) -> bool:
        try:
            return self.exchange.look(handle) is not None
        except Exception:  # nobody can fetch it either
            return False

    def _remove(self, handle: str) -> bool:
        try:
            self.exchange.remove(handle)
        except Exception as e:  # one that stays must not keep the others
            self._log.warning("%s was not fetched, and cannot be deleted: %s", handle, e)
            return False
        return True
