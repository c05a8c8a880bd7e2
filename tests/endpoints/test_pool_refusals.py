"""A job that endpoints refuse ends with their words, when all that are well were asked; others go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from firesteel.endpoints.pool import Counts, Pool, RefusedError
from firesteel.endpoints.roster import Roster
from firesteel.recipe import Endpoints

QUICK: dict[str, Any] = {"timeout": 20.0, "backoff": 0.01, "backoff_max": 0.05, "outage": 30.0, "retries": 50, "concurrency": 2}


def run(reply: Callable[[str, int], Exception | None], endpoints: Sequence[str], jobs: int = 8) -> tuple[list[Any], Counts, Counter[tuple[str, int]]]:
    """What came of each job (its number, or the error), what the pool counted, and how often each endpoint was asked for each job."""
    asked: Counter[tuple[str, int]] = Counter()

    async def ask(endpoint: str, job: int) -> int:
        asked[endpoint, job] += 1
        await asyncio.sleep(0.001)
        if (error := reply(endpoint, job)) is not None:
            raise error
        return job

    async def main() -> tuple[list[Any], Counts]:
        pool: Pool[int, int] = Pool(ask, Roster(endpoints), Endpoints(**QUICK), "job")
        pool.start()
        try:
            found = await asyncio.gather(*(pool.submit(j, size=1, name=str(j)) for j in range(jobs)), return_exceptions=True)
        finally:
            await pool.close()
        assert pool.error is None
        return found, pool.counts

    found, counts = asyncio.run(main())
    return found, counts, asked


def test_one_bad_job_ends_alone() -> None:
    found, counts, asked = run(lambda endpoint, job: RefusedError(f"{endpoint}: too long") if job == 3 else None, ["a", "b"])
    assert [f for f in found if isinstance(f, int)] == [0, 1, 2, 4, 5, 6, 7]
    assert isinstance(found[3], RefusedError)
    assert "too long" in str(found[3])
    assert (asked["a", 3], asked["b", 3]) == (1, 1)
    assert (counts.answers, counts.bad, counts.faults) == (7, 0, 0)


def test_what_one_refuses_another_may_do() -> None:
    found, _, asked = run(lambda endpoint, job: RefusedError("too long") if endpoint == "short" and job % 2 else None, ["short", "long"], 40)
    assert found == list(range(40))
    assert all(count == 1 for count in asked.values())


def test_all_jobs_may_be_refused() -> None:
    found, counts, _ = run(lambda endpoint, job: RefusedError("no such parameter"), ["a", "b"], 40)
    assert all(isinstance(f, RefusedError) for f in found)
    assert counts.answers == 0


def test_an_endpoint_that_is_gone_is_not_waited_for() -> None:
    def reply(endpoint: str, job: int) -> Exception | None:
        if endpoint == "gone":
            return ConnectionError("nobody listens")
        return RefusedError("too long") if job == 0 else None

    found, _, _ = run(reply, ["well", "gone"])
    assert isinstance(found[0], RefusedError)
    assert found[1:] == list(range(1, 8))
