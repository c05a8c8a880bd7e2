"""Samples made on demand, by many endpoints, while training runs.

The feed lives in a thread of its own with an event loop. Training asks for batch after batch; the feed fetches the samples
of the next ones in the order of the plan, so a run sees the same batches whatever arrives when, and whoever sends it.
To resume, ask for another batch than the next: the feed goes there.

It knows neither HTTP nor where samples lie: `fetch(endpoint, work)` returns one, or raises as `endpoints.pool` describes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from firesteel.endpoints.pool import Pool
from firesteel.endpoints.roster import Roster
from firesteel.errors import HiddenStateError
from firesteel.hidden.sample import HiddenSample
from firesteel.hidden.window import Plan, Slot, Window, watermarks
from firesteel.recipe import Endpoints, Feed

_PATIENCE = 30.0  # seconds that closing waits for what cannot be interrupted


@dataclass(frozen=True)
class Work:
    """A document whose hidden states are wanted.

    Attributes:
        key: names the sample.
        token_ids: T ids.
        loss_mask: T booleans, True where the token is supervised.
    """

    key: str
    token_ids: list[int]
    loss_mask: list[bool]


Fetch = Callable[[str, Work], Awaitable[HiddenSample]]
Check = Callable[[HiddenSample], None]


class SampleFeed:
    """Batches of samples, fetched ahead.

    Args:
        fetch: makes one sample at an endpoint. Runs in the feed's thread.
        works: the documents, by number.
        roster: the endpoints, which may change while the feed runs.
        settings: watermarks, budgets and times.
        step_tokens: tokens of an optimiser step, at most, over all trainers.
        check: refuses a sample with `HiddenStateError`; it is then fetched again within the budget.
        finish: closes what `fetch` needs, in the feed's thread, or in that of `close` where no batch was ever taken.

    Attributes:
        stop: the batch number that will not be wanted any more, so that nothing is fetched in vain; None: no end. To be set before the
            first `take`. It is a guess: who takes a batch beyond it gets it.

    Raises:
        RecipeError: the watermarks cannot hold an optimiser step.
    """

    def __init__(
        self,
        fetch: Fetch,
        works: Sequence[Work],
        roster: Roster,
        settings: Feed,
        *,
        step_tokens: int,
        check: Check,
        finish: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._low, self._high = watermarks(settings, step_tokens)
        self._fetch, self._works, self._check, self._finish = fetch, works, check, finish
        self._settings = settings
        self.stop: int | None = None
        self._pool: Pool[Work, HiddenSample] = Pool(self._ask, roster, Endpoints(**settings.model_dump(include=set(Endpoints.model_fields))), "sample")
        self._window: Window[HiddenSample] | None = None
        self._futures: dict[Slot[HiddenSample], asyncio.Future[HiddenSample]] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = threading.Event()
        self._closed = False

    def take(self, number: int, plan: Plan) -> list[HiddenSample]:
        """The samples of batch `number`, in the order of `plan(number)`; waits until they are here. They belong to the caller: the feed forgets them.

        Args:
            number: the next batch, or any other to go there.
            plan: documents of every batch; always the same one.

        Raises:
            FiresteelError: a budget is used up; the message has the last error.
        """
        assert not self._closed, "the feed is closed"
        if self._thread is None:
            self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="feed", daemon=True)
            self._thread.start()
            self._running.wait()
        assert self._loop is not None, "set before the thread says that it runs"
        waiting = asyncio.run_coroutine_threadsafe(self._take(number, plan), self._loop)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()
            raise

    def report(self) -> dict[str, Any]:
        """Counts so far: `endpoints.pool.Counts`, the endpoints in use, and the most tokens that were held at once."""
        peak = 0 if self._window is None else self._window.peak
        return {**{f"feed_{name}": count for name, count in asdict(self._pool.counts).items()}, "feed_peak_tokens": peak}

    def endpoints(self) -> list[dict[str, Any]]:
        """The endpoints and how they do, see `endpoints.pool.Pool.rows`; none before the first `take`."""
        return self._pool.rows() if self._running.is_set() else []

    @property
    def held(self) -> int:
        """Tokens that are here, or asked for."""
        return 0 if self._window is None else self._window.held

    def close(self) -> None:
        """End the thread and everything under way in it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(_PATIENCE)
        elif self._finish is not None:
            asyncio.run(_run(self._finish))

    def __enter__(self) -> SampleFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending, self._news = asyncio.Event(), asyncio.Event()
        # Whatever breaks in here must reach whoever trains.
        self._loop.set_exception_handler(lambda _, context: self._broke(context.get("exception") or RuntimeError(context["message"])))
        try:
            self._pool.start()
        finally:
            self._running.set()
        try:
            await self._ending.wait()
        finally:
            await self._pool.close()
            if self._finish is not None:
                await self._finish()

    async def _take(self, number: int, plan: Plan) -> list[HiddenSample]:
        if self._window is None:
            lengths = [len(w.token_ids) for w in self._works]
            s = self._settings
            self._window = Window(lengths, plan, low=self._low, high=self._high, uses=s.uses, keep=s.keep_tokens, stop=self.stop)
        window = self._window
        if window.next != number:
            for slot in window.seek(number):
                if slot in self._futures:
                    self._futures[slot].cancel()
        if window.stop is not None and number >= window.stop:
            window.stop = None
        self._refill(window)
        while not window.ready(number):
            if self._pool.error is not None:
                raise self._pool.error
            self._news.clear()
            await self._news.wait()
        samples = window.consume(number)
        self._refill(window)
        return samples

    def _refill(self, window: Window[HiddenSample]) -> None:
        if self._pool.error is not None:
            raise self._pool.error
        for slot in window.wanted():
            if slot.sample is None:
                work = self._works[slot.document]
                future = self._pool.submit(work, size=len(work.token_ids), name=work.key)
                self._futures[slot] = future
                future.add_done_callback(lambda f, s=slot: self._landed(s, f))  # type: ignore[misc]

    def _landed(self, slot: Slot[HiddenSample], future: asyncio.Future[HiddenSample]) -> None:
        del self._futures[slot]
        if not future.cancelled() and future.exception() is None:
            slot.sample = future.result()
        self._news.set()

    async def _ask(self, endpoint: str, work: Work) -> HiddenSample:
        sample = await self._fetch(endpoint, work)
        await asyncio.to_thread(self._accept, work, sample)
        return sample

    def _accept(self, work: Work, sample: HiddenSample) -> None:
        if sample.key != work.key:
            raise HiddenStateError(f"states of document {sample.key} came for document {work.key}")
        if sample.token_ids.tolist() != work.token_ids or sample.loss_mask.tolist() != work.loss_mask:
            raise HiddenStateError(f"sample {work.key} came with other tokens than were asked about")
        self._check(sample)

    def _broke(self, error: BaseException) -> None:
        self._pool.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))
        self._news.set()


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()
