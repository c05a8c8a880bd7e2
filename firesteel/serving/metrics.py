"""What the server counts, as Prometheus reads it, under the names that vLLM gives the same things."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence

from firesteel.decoding.batched.engine import Engine
from firesteel.serving.answer import Delta

# Upper bounds in seconds; a time of a whole request may be long, one between two tokens is not.
_FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """Counts of one server; asyncio's thread keeps them. What the engine counts itself is read when somebody asks."""

    def __init__(self) -> None:
        self.first_token, self.between, self.per_token, self.whole = Histogram(_FIRST), Histogram(_BETWEEN), Histogram(_BETWEEN), Histogram(_WHOLE)
        self.finished: Counter[str] = Counter()

    def render(self, engine: Engine, model: str, open_answers: int) -> str:
        """The page of metrics.

        Args:
            open_answers: asked for and not complete; those that the engine does not run wait.
        """
        c, pool, running = engine.counters, engine.pool, engine.running
        page = _Page(model)
        page.value("vllm:num_requests_running", "gauge", "Answers that are being written.", running)
        page.value("vllm:num_requests_waiting", "gauge", "Answers that wait for their turn.", max(0, open_answers - running))
        page.value("vllm:kv_cache_usage_perc", "gauge", "Share of the cache's blocks in use; 1 is all of them.", pool.used / pool.blocks)
        page.value("vllm:prefix_cache_queries", "counter", "Prompt tokens that were looked up in the prefix cache.", pool.queried)
        page.value("vllm:prefix_cache_hits", "counter", "Prompt tokens found there.", pool.hit)
        page.value("vllm:num_preemptions", "counter", "Answers that gave their blocks back and began again.", c.preemptions)
        page.value("vllm:prompt_tokens", "counter", "Tokens of prompts.", c.prompt_tokens)
        page.value("vllm:generation_tokens", "counter", "Generated tokens.", c.generated_tokens)
        reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0} | self.finished
        page.labelled("vllm:request_success", "counter", "Complete answers.", [(f'finished_reason="{r}"', n) for r, n in reasons.items()])
        if engine.drafter is not None:
            page.value("vllm:spec_decode_num_drafts", "counter", "Rounds in which drafts were verified.", c.rounds)
            page.value("vllm:spec_decode_num_draft_tokens", "counter", "Drafts that were verified.", c.drafted)
            page.value("vllm:spec_decode_num_accepted_tokens", "counter", "Drafts that were accepted.", c.accepted)
            positions = [(f'position="{k}"', n) for k, n in enumerate(c.by_position)]
            page.labelled("vllm:spec_decode_num_accepted_tokens_per_pos", "counter", "Accepted drafts by position in their round.", positions)
        page.histogram("vllm:time_to_first_token_seconds", "From the request's arrival to its first token.", self.first_token)
        page.histogram("vllm:inter_token_latency_seconds", "Between the steps that brought an answer's tokens.", self.between)
        page.histogram("vllm:request_time_per_output_token_seconds", "Mean time of an answer's tokens after the first.", self.per_token)
        page.histogram("vllm:e2e_request_latency_seconds", "From the request's arrival to the end of its answer.", self.whole)
        page.value("firesteel:engine_steps", "counter", "Steps of the engine.", c.steps)
        page.value("firesteel:engine_step_tokens", "counter", "Tokens that these steps ran through the target.", c.step_tokens)
        return page.text


class Stopwatch:
    """The times of one answer.

    Args:
        started: `time.perf_counter()` at the request's arrival.
    """

    def __init__(self, metrics: Metrics, started: float) -> None:
        self._metrics, self._started = metrics, started
        self._first = self._last = 0.0
        self._tokens = 0

    def take(self, delta: Delta) -> None:
        if delta.tokens:
            if self._tokens:
                self._metrics.between.observe(delta.at - self._last)
            else:
                self._first = delta.at
                self._metrics.first_token.observe(delta.at - self._started)
            self._tokens, self._last = self._tokens + delta.tokens, delta.at
        if delta.last:
            reason = "error" if delta.error is not None else str(delta.finish)
            self._metrics.finished[reason] += 1
            if reason in ("stop", "length"):
                self._metrics.whole.observe(delta.at - self._started)
                if self._tokens > 1:
                    self._metrics.per_token.observe((self._last - self._first) / (self._tokens - 1))


class _Page:
    """Prometheus' text format, version 0.0.4."""

    def __init__(self, model: str) -> None:
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self.text, self._model = "", f'model_name="{escaped}"'

    def value(self, name: str, kind: str, help_text: str, value: float) -> None:
        self.labelled(name, kind, help_text, [("", value)])

    def labelled(self, name: str, kind: str, help_text: str, values: Iterable[tuple[str, float]]) -> None:
        full = f"{name}_total" if kind == "counter" else name
        self._head(full, kind, help_text)
        self.text += "".join(f"{full}{{{self._model}{',' if label else ''}{label}}} {_number(value)}\n" for label, value in values)

    def histogram(self, name: str, help_text: str, found: Histogram) -> None:
        self._head(name, "histogram", help_text)
        below = 0
        for bound, count in zip((*map(_number, found.bounds), "+Inf"), found.counts, strict=True):
            below += count
            self.text += f'{name}_bucket{{{self._model},le="{bound}"}} {below}\n'
        self.text += f"{name}_sum{{{self._model}}} {_number(found.sum)}\n{name}_count{{{self._model}}} {below}\n"

    def _head(self, name: str, kind: str, help_text: str) -> None:
        self.text += f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
