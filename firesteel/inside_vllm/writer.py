"""The worker's side: states out of the cache, off the device, encoded and handed over, all but the first off the critical path."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from firesteel.errors import HiddenStateError, ResourceError
from firesteel.hidden.exchange import Exchange, Leases
from firesteel.hidden.wire import from_ranges, pack
from firesteel.inside_vllm.plan import Save

_PATIENCE = 10.0  # seconds that a full store is tried again
_PAUSES = (0.1, 1.0, 5.0)  # seconds between the tries to leave a marker


def gather(cache: Tensor, blocks: Sequence[int], positions: Tensor, columns: Sequence[int]) -> Tensor:
    """States out of the paged cache.

    Args:
        cache: `[num_blocks, n_ids, block_size, d]`, a view of any strides.
        blocks: of one sequence, in order.
        positions: `[P]` int64 in it, on the CPU.
        columns: of the cache, m of them.

    Returns:
        `[P, m, d]`, a copy on the cache's device.
    """
    size = cache.shape[2]
    index = torch.stack([torch.tensor(blocks, dtype=torch.int64)[positions // size], positions % size])
    if cache.is_cuda:
        index = index.pin_memory().to(cache.device, non_blocking=True)
    block, offset = index
    return cache[block[:, None], torch.tensor(columns, device=cache.device), offset[:, None]]


class Writer:
    """Hands samples over by a few threads.

    Args:
        exchange: where to.
        layer_ids: of the cache's columns.
        num_layers: id of the last layer's output.
        weights: digest that goes into each sample's header.
        lease: seconds after which what nobody fetched is deleted.
        threads: that encode and send.
        pending: bytes that may wait to be sent; the forward pass waits beyond that.
    """

    def __init__(
        self, exchange: Exchange, layer_ids: Sequence[int], num_layers: int, weights: str | None, *, lease: float, threads: int = 2, pending: int = 2 << 30
    ) -> None:
        self.exchange, self.layer_ids, self.weights = exchange, list(layer_ids), weights or ""
        self.last_column = self.layer_ids.index(num_layers)
        self._leases = Leases(exchange, lease)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="firesteel")
        self._limit, self._pending, self._room = pending, 0, threading.Condition()
        self._stream: Any = None
        self._log = logging.getLogger("vllm.firesteel")

    def submit(self, save: Save, cache: Tensor) -> None:
        """Take a request's states; when this returns, its blocks may be written by the work that follows on the device.

        Never raises: the engine goes on, and the client is told by a marker.
        """
        handle = save.wanted.handle
        try:
            self._take(save, cache)
        except Exception as e:
            error, again = self._say(handle, e)
            try:
                self._pool.submit(self._fail, handle, error, again)
            except RuntimeError:
                self._log.error("no hidden states for %s, and no marker: this server is ending", handle)

    def finish(self) -> None:
        """Send what waits; nothing can be submitted after."""
        self._pool.shutdown(wait=True)

    def close(self) -> None:
        """Send what waits, delete what nobody fetches, and leave the store."""
        self.finish()
        self._leases.close()
        self.exchange.close()

    def _take(self, save: Save, cache: Tensor) -> None:
        if save.error is not None:
            raise ResourceError(save.error)
        length, room = len(save.token_ids), len(save.blocks) * cache.shape[2]
        if length > room:
            raise ResourceError(f"the prompt has {length} tokens, its blocks hold {room}")
        positions = from_ranges(save.wanted.last, length)
        columns = [self.layer_ids.index(i) for i in save.wanted.layer_ids]
        aux = gather(cache, save.blocks, torch.arange(length), columns)
        last = gather(cache, save.blocks, positions, [self.last_column])[:, 0]
        size = aux.nbytes + last.nbytes
        with self._room:
            self._room.wait_for(lambda: self._pending == 0 or self._pending + size <= self._limit)
            self._pending += size
        try:
            (aux, last), ready = self._to_host([aux, last])
            self._pool.submit(self._write, save, aux, last, positions, ready, size)
        except BaseException:
            self._sent(size)
            raise

    def _sent(self, size: int) -> None:
        with self._room:
            self._pending -= size
            self._room.notify_all()

    def _say(self, handle: str, error: Exception) -> tuple[str, bool]:
        """What a marker says of an error, and whether another try may help."""
        if isinstance(error, HiddenStateError | ResourceError):
            return str(error), isinstance(error, ResourceError)
        self._log.error("hidden states of %s were not handed over", handle, exc_info=error)
        return f"{type(error).__name__}: {error}", True

    def _to_host(self, states: list[Tensor]) -> tuple[list[Tensor], Callable[[], None] | None]:
        """Copies into pinned memory on a stream of their own; the second value waits for them. On a CPU nothing is left to do."""
        if not states[0].is_cuda:
            return states, None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = [torch.empty(s.shape, dtype=s.dtype, pin_memory=True) for s in states]
            for there, here in zip(host, states, strict=True):
                there.copy_(here, non_blocking=True)
                here.record_stream(self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        return host, done.synchronize

    def _write(self, save: Save, aux: Tensor, last: Tensor, positions: Tensor, ready: Callable[[], None] | None, size: int) -> None:
        handle = save.wanted.handle
        try:
            if ready is not None:
                ready()
            ids = torch.tensor(save.token_ids, dtype=torch.int64)
            data = pack(handle, ids, aux, last, positions, layer_ids=save.wanted.layer_ids, codec=save.wanted.codec, target=self.weights)
            self._send(handle, data)
        except Exception as e:  # whatever it is, the client must hear of it
            self._fail(handle, *self._say(handle, e))
        else:
            self._leases.add(handle)
        finally:
            self._sent(size)

    def _send(self, handle: str, data: bytes) -> None:
        """A full store empties as the trainer fetches: wait a little for it."""
        deadline, pause = time.monotonic() + _PATIENCE, 0.05
        while True:
            try:
                return self.exchange.put(handle, data)
            except ResourceError:
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _fail(self, handle: str, error: str, again: bool) -> None:
        self._log.warning("no hidden states for %s: %s", handle, error)
        for pause in (*_PAUSES, None):
            try:
                self.exchange.fail(handle, error, again=again)
                break
            except Exception as e:  # a store that cannot take data may not take words either
                self._log.error("the failure of %s cannot be said%s: %s", handle, " for good" if pause is None else "", e)
            if pause is not None:
                time.sleep(pause)
        self._leases.add(handle)  # without a marker, too: some of the data may be there
