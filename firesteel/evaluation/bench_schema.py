"""The schema of `bench.json`, as typed parts. `docs/bench.md` explains every key.

As in the report's schema, a key is always there, and what was not told or not measured is null, never 0.
Seconds and milliseconds are the load generator's clock; counts of drafts are the server's own.
"""

from __future__ import annotations

from firesteel.evaluation.schema import Interval, Machine, Part

SCHEMA_VERSION = 1
MIXED = "all"  # the domain of measurements whose prompts are of all domains


class Answer(Part):
    """One request that was answered in full. Times in seconds on one clock; tokens as the server's `usage` tells them."""

    start: float
    first: float
    last: float
    end: float
    prompt_tokens: int
    tokens: int
    chunks: int


class Load(Part):
    """What the load generator saw in one measurement; `failures` counts requests by what went wrong."""

    answers: list[Answer]
    failures: dict[str, int]


class Drafting(Part):
    """Speculative decoding as the server counted it during a measurement: rounds of single requests, and tokens."""

    rounds: int
    drafted: int
    accepted: int
    accepted_by_position: list[int]


class Served(Part):
    """What the server's metrics tell of a measurement; null where it has no such counter.

    `tokens` is all it generated meanwhile, `cached_share` the share of prompt tokens that came from its prefix cache.
    """

    drafting: Drafting | None
    tokens: int | None
    cached_share: float | None


class Quantiles(Part):
    """Over the requests of one measurement."""

    median: float
    p90: float
    p99: float


class Measurement(Part):
    """One server at one concurrency, once."""

    server: str
    domain: str
    concurrency: int
    repeat: int
    completed: int
    failed: int
    failures: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float | None
    tokens_per_second_whole: float | None
    tokens_per_second_per_user: float | None
    ttft_ms: Quantiles | None
    tpot_ms: Quantiles | None
    chunk_gap_ms: Quantiles | None
    latency_s: Quantiles | None
    acceptance_length: float | None
    drafted_per_step: float | None
    accepted_per_step: float | None
    served: Served


class Spread(Part):
    """A figure over the repeats: median, and the lowest and highest of `n`."""

    median: float
    low: float
    high: float
    n: int


class Point(Part):
    """All repeats of one server at one concurrency. `on_frontier`: no level of this server is better in both throughput and interactivity."""

    server: str
    domain: str
    concurrency: int
    completed: int
    failed: int
    failures: dict[str, int]
    on_frontier: bool
    tokens_per_second: Spread | None
    tokens_per_second_per_user: Spread | None
    ttft_ms: Spread | None
    ttft_p90_ms: Spread | None
    ttft_p99_ms: Spread | None
    tpot_ms: Spread | None
    tpot_p90_ms: Spread | None
    tpot_p99_ms: Spread | None
    chunk_gap_ms: Spread | None
    latency_s: Spread | None
    latency_p90_s: Spread | None
    latency_p99_s: Spread | None
    acceptance_length: Spread | None
    drafted_per_step: Spread | None
    accepted_per_step: Spread | None
    cached_share: Spread | None


class Matched(Part):
    """Two servers where one axis is equal: at a level of the baseline's frontier. Null: the other server's frontier does not reach there."""

    concurrency: int
    at: float
    baseline: float
    value: float | None
    gain: float | None
    interval: Interval | None


class Paired(Part):
    """Two servers at the same concurrency, repeat by repeat: their ratios, above 1 where the server is better (for ttft: slower)."""

    concurrency: int
    tokens_per_second: Spread | None
    tokens_per_second_per_user: Spread | None
    ttft_ms: Spread | None


class Gain(Part):
    """A server against the baseline.

    `interactivity`: at equal tokens/s per user, how much throughput. `throughput`: at equal throughput, how many tokens/s per user.
    """

    server: str
    baseline: str
    domain: str
    interactivity: list[Matched]
    throughput: list[Matched]
    concurrency: list[Paired]


class ServerFacts(Part):
    """A server that was measured. `software` is what it says of itself, `counters` whether it counts drafts."""

    url: str
    model: str
    software: str | None
    counters: bool


class BenchRun(Part):
    """Where the numbers come from. `salt` makes the leads of prompts; `machine` is the one that sent the load."""

    recipe: str
    date: str
    command: str
    seed: int
    salt: str | None
    api: str
    concurrency: list[int]
    repeats: int
    requests: int
    min_requests: int
    warmup: int
    max_new_tokens: int
    temperature: float
    prompts: dict[str, int]
    baseline: str
    machine: Machine
    versions: dict[str, str]


class Bench(Part):
    """The whole of `bench.json`."""

    schema_version: int
    run: BenchRun
    servers: dict[str, ServerFacts]
    points: list[Point]
    gains: list[Gain]
    measurements: list[Measurement]
    notes: list[str]
