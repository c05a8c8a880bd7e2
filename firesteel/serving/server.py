"""Server: the application on a port, from its start to its last answer."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

from firesteel.errors import ResourceError, TargetError
from firesteel.serving.api import build_app
from firesteel.serving.service import Service
from firesteel.target.server import local_url

try:
    import uvicorn
except ImportError as e:
    raise ResourceError(f"the server needs FastAPI and uvicorn ({e})", mend='pip install "firesteel[server]"') from None

_BACKLOG = 2048
# Seconds that an idle connection is kept. Clients that use one again just when it is closed see an error, so it is long.
_KEEP_ALIVE = 75
# Seconds in which clients must have taken what was written for them when everything else has ended.
_LAST_BYTES = 5


class Server:
    """A service at `serve.host` and `serve.port`. The port is taken at once, so that a taken one is found out before anything is loaded.

    Raises:
        TargetError: the address cannot be listened at.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            _refuse_taken(family, host, port)
            self._socket.bind((host, port))  # it listens later: until then clients are turned away and do not wait
        except OSError as e:
            self._socket.close()
            raise self._refused(e) from e
        self.port = self._socket.getsockname()[1]
        self._inner: _Uvicorn | None = None
        self._up = threading.Event()

    @property
    def url(self) -> str:
        """For a client on the same machine."""
        return local_url(self.host, self.port)

    def run(self, service: Service) -> None:
        """Serve until SIGTERM, Ctrl-C or `stop`; then finish what runs. A second signal ends at once.

        Signals are heard in the main thread only.

        Raises:
            TargetError: another server has begun to listen at the port meanwhile.
        """
        asyncio.run(self._run(service))

    def wait_until_up(self, seconds: float) -> None:
        """For another thread than the one that runs it.

        Raises:
            TargetError: it takes longer.
        """
        if not self._up.wait(seconds):
            raise TargetError(f"the server is not up after {seconds:g} s")

    def stop(self) -> None:
        """What a first signal does; from any thread."""
        if self._inner is not None:
            self._inner.end()

    def close(self) -> None:
        """Give the port back where nothing was run."""
        self._socket.close()

    def _refused(self, why: OSError) -> TargetError:
        return TargetError(
            f"{self.host}:{self.port} cannot be listened at: {why}", mend="set serve.port to a free port, serve.host to an address of this machine"
        )

    async def _run(self, service: Service) -> None:
        aio = asyncio.get_running_loop()
        config = uvicorn.Config(
            build_app(service),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_BYTES,
        )
        inner = _Uvicorn(config, service.drain, aio, self._up.set)
        self._inner = inner
        service.thread.start(aio)
        try:
            await inner.serve(sockets=[self._socket])
        except OSError as e:
            if self._up.is_set():
                raise
            raise self._refused(e) from e
        finally:
            self._inner = None
            # It ends after the step that runs; answers that are still open are given back to the caches.
            await asyncio.to_thread(service.close)
            self._socket.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn, but a signal first lets requests finish while new ones are told why they are refused, and the process ends with code 0."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Coroutine[Any, Any, None]], aio: asyncio.AbstractEventLoop, up: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain, self._aio, self._up = drain, aio, up
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._ending is not None and sig in (signal.SIGINT, signal.SIGTERM):
            self.should_exit = self.force_exit = True
        else:
            self.end()

    def end(self) -> None:
        self._aio.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        try:
            await self._drain()
        finally:
            self.should_exit = True


def _refuse_taken(family: socket.AddressFamily, host: str, port: int) -> None:
    """Find a server that has taken the port and does not listen yet: beside its socket the system lets another one be bound, and only one can listen.

    Raises:
        OSError: there is one.
    """
    with socket.socket(family) as probe:  # without SO_REUSEADDR
        try:
            probe.bind((host, port))
        except OSError as e:
            # Connections of an earlier server, which are no obstacle, are in the system's list; a socket that was only bound is not.
            if e.errno == errno.EADDRINUSE and not _listed(port):
                raise


def _listed(port: int) -> bool:
    """Whether some connection or listening socket of this machine has the port (True where the system does not tell)."""
    found = False
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            rows = table.read_text().splitlines()[1:]
        except OSError:
            found = found or table.name == "tcp"
            continue
        found = found or any(int(row.split()[1].rpartition(":")[2], 16) == port for row in rows)
    return found
