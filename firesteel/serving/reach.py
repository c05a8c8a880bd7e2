"""A server before it is measured: is it there, what does it serve, and is it warm?"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from firesteel.errors import RecipeError, TargetError
from firesteel.serving.load import LoadPlan

_PATIENCE = 30.0  # seconds until a server at rest must name its models


@dataclass(frozen=True)
class Reached:
    """A server that answered: its address without /v1, the model to ask for, and the software it names as the model's owner."""

    url: str
    model: str
    software: str | None


def reach(name: str, url: str, model: str | None, api_key: str | None) -> Reached:
    """Ask a server which models it has, and pick the one to measure (without a wish the first).

    Raises:
        TargetError: nobody answers there, or not as the OpenAI API does.
        RecipeError: it does not serve the wanted model.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise RecipeError(f"bench.servers: {name} is at {url!r}, which is not http://HOST:PORT", mend=f"--server {name}=http://127.0.0.1:8000")
    try:
        answer = httpx.get(f"{base}/v1/models", headers=authorization(api_key), timeout=_PATIENCE, trust_env=False)
        answer.raise_for_status()
        models: list[dict[str, Any]] = answer.json()["data"]
        names = [str(m["id"]) for m in models]
    except httpx.HTTPStatusError as e:
        keys = "set bench.api_key_variable" if e.response.status_code in (401, 403) else "give the address of an OpenAI-compatible server"
        raise TargetError(f"server {name} answers {base}/v1/models with {e.response.status_code}: {e.response.text[:200]}", mend=keys) from None
    except httpx.InvalidURL as e:
        raise RecipeError(f"bench.servers: {name} is at {url!r}, which is no address: {e}", mend=f"--server {name}=http://127.0.0.1:8000") from None
    except httpx.HTTPError as e:
        raise TargetError(f"server {name} cannot be reached at {base}: {e}", mend=f"start it, or --server {name}=ITS_ADDRESS (bench.servers)") from None
    except (ValueError, KeyError, TypeError):
        raise TargetError(f"what answers at {base}/v1/models is no OpenAI-compatible server", mend=f"--server {name}=ITS_ADDRESS (bench.servers)") from None
    if not names or (model is not None and model not in names):
        wanted = "a model" if model is None else repr(model)
        raise RecipeError(f"server {name} at {base} does not serve {wanted}; it serves {', '.join(names) or 'none'}", mend="set bench.model, or leave it out")
    at = 0 if model is None else names.index(model)
    owner = models[at].get("owned_by")
    return Reached(base, names[at], str(owner) if owner else None)


def warm_up(plan: LoadPlan) -> None:
    """Send the plan's requests, `concurrency` at a time, and forget the answers; what fails here will fail, and be counted, when it is measured."""
    chat = plan.api == "chat"
    shared = {"model": plan.model, "max_completion_tokens" if chat else "max_tokens": plan.max_new_tokens, **plan.body}
    bodies = [{**shared, "messages" if chat else "prompt": request} for request in plan.requests]
    path = "/v1/chat/completions" if chat else "/v1/completions"
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=plan.url, headers=authorization(plan.api_key), timeout=plan.timeout, limits=limits, trust_env=False) as client:

        def ask(body: dict[str, Any]) -> None:
            with suppress(httpx.HTTPError):
                client.post(path, json=body)

        _all(ask, bodies, plan.concurrency)


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that carries the key, if there is one."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _all(ask: Any, bodies: Sequence[dict[str, Any]], at_a_time: int) -> None:
    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(ask, bodies))
