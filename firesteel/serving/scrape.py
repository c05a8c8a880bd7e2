"""What a server's /metrics say, before and after: drafts, generated tokens, prefix cache. What it does not tell stays unknown."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx

from firesteel.errors import VerificationError
from firesteel.evaluation.bench_schema import Drafting, Served
from firesteel.serving.counters import Counters, parse_counters

_GENERATED = "vllm:generation_tokens_total"
_ASKED, _HIT = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True)
class Scrape:
    """Counters at one moment; None where the page has none. `read`: there was a page."""

    counters: Counters | None
    generated: float | None
    cache_asked: float | None
    cache_hit: float | None
    read: bool = True


def parse_metrics(text: str) -> Scrape:
    """A page in Prometheus' format."""
    return Scrape(parse_counters(text), _total(text, _GENERATED), _total(text, _ASKED), _total(text, _HIT))


def scrape(url: str, headers: dict[str, str], timeout: float) -> Scrape:
    """The counters of a server; nothing where it has no /metrics, since an OpenAI-compatible server need not have one."""
    try:
        answer = httpx.get(f"{url}/metrics", headers=headers, timeout=timeout, trust_env=False)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL):
        return Scrape(None, None, None, None, read=False)
    return parse_metrics(answer.text)


def between(before: Scrape, after: Scrape, server: str) -> Served:
    """What was counted in between; nothing is known where one of the two pages could not be read.

    Raises:
        VerificationError: a counter fell: the server was started anew meanwhile.
    """
    if not (before.read and after.read):
        return Served(drafting=None, tokens=None, cached_share=None)
    asked, hit = _rise(before.cache_asked, after.cache_asked), _rise(before.cache_hit, after.cache_hit)
    generated = _rise(before.generated, after.generated)
    drafting = None
    if after.counters is not None:
        # Counters that only come with the first draft stood at nothing before it.
        rise = after.counters.since(before.counters or Counters(0, 0, 0, ()))
        drafting = Drafting(rounds=rise.drafts, drafted=rise.drafted, accepted=rise.accepted, accepted_by_position=list(rise.by_position))
    counted = (asked, hit, generated, *(() if drafting is None else (drafting.rounds, drafting.drafted, drafting.accepted)))
    fell = any(v is not None and v < 0 for v in counted)
    if fell:
        raise VerificationError(
            f"{server}: the server's counters fell during a measurement: it was started anew, or a proxy asks several servers in turn",
            mend="measure again, each server at its own address (bench.servers)",
        )
    return Served(drafting=drafting, tokens=None if generated is None else round(generated), cached_share=hit / asked if hit is not None and asked else None)


def _total(text: str, name: str) -> float | None:
    """A counter, all its labels together."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found)) if found else None


def _rise(before: float | None, after: float | None) -> float | None:
    return None if after is None else after - (before or 0.0)
