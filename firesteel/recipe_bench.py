"""The section of a recipe that `firesteel bench` reads. The rest of Firesteel takes it from `firesteel.recipe`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from firesteel.recipe_sections import Section


class Bench(Section):
    python: str | None = Field(None, description="Python of the environment that has guidellm; empty takes Firesteel's own.")
    servers: dict[str, str] = Field(
        default_factory=dict,
        description="Servers to measure in alternation, such as {drafter: 'http://127.0.0.1:8000', plain: 'http://127.0.0.1:8001'}; "
        "empty: `drafter`, at serve.host and serve.port.",
    )
    baseline: str | None = Field(None, description="Name of the server that others are compared with; empty takes the one named `plain`, else the last.")
    model: str | None = Field(None, description="Name of the model to ask for; empty takes the first that a server names.")
    api: Literal["chat", "completions"] = Field("chat", description="Which endpoint is asked: `chat` sends messages, `completions` bare text.")
    api_key_variable: str | None = Field(None, description="Environment variable that holds the servers' API key.")
    prompts: str | None = Field(None, description="JSONL file of prompts; empty takes the recipe's held-out ones.")
    domains: list[str] = Field(default_factory=list, description="Domains whose prompts are sent; empty takes all.")
    by_domain: bool = Field(False, description="Measure every domain by itself, with a chart for each; otherwise prompts of all are mixed.")
    concurrency: list[int] = Field(default_factory=lambda: [1, 2, 4, 8, 16, 32], description="Requests under way at a time, one level after the other.")
    requests: int = Field(4, description="Requests of a measurement, per request under way.", ge=1)
    min_requests: int = Field(8, description="Requests of a measurement at least.", ge=1)
    repeats: int = Field(3, description="How often everything is measured; the spread comes from it.", ge=1)
    warmup: int = Field(1, description="Requests that are sent before each measurement and not counted, per request under way.", ge=0)
    max_new_tokens: int = Field(128, description="Longest answer, in tokens.", ge=2)
    temperature: float = Field(0.0, description="Temperature of the requests; 0 is greedy.", ge=0)
    body: dict[str, Any] = Field(default_factory=dict, description="Further fields of every request, such as {ignore_eos: true}.")
    unique: bool = Field(True, description="Every prompt begins with a short text of its own, so that no prefix cache knows it.")
    request_timeout: float = Field(600.0, description="Seconds until the next part of an answer must come.", gt=0)

    @field_validator("concurrency")
    @classmethod
    def _levels(cls, value: list[int]) -> list[int]:
        if not value or min(value) < 1 or len(set(value)) < len(value):
            raise ValueError("needs levels of at least 1, each once")
        return sorted(value)
