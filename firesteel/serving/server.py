"""Server: the application on a port, from its start to its last answer."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from firesteel.errors import ResourceError, TargetError
from firesteel.serving.api import build_app
from firesteel.serving.service import Service

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
        self.host = host
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))  # it listens later: until then clients are turned away and do not wait
        except OSError as e:
            self._socket.close()
            raise TargetError(
                f"{host}:{port} cannot be listened at: {e}", mend="set serve.port to a free port, serve.host to an address of this machine"
            ) from e
        self.port: int = self._socket.getsockname()[1]
        self._inner: _Uvicorn | None = None
        self._up = threading.Event()

    @property
    def url(self) -> str:
        """For a client on the same machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def run(self, service: Service) -> None:
        """Serve until SIGTERM, Ctrl-C or `stop`; then finish what runs. A second signal ends at once.

        Signals are heard in the main thread only.
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
