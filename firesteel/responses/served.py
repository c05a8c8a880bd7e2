"""Answers from OpenAI-compatible servers: our own rendered token ids go there, token ids come back.

The completions endpoint is used and not the chat one, because it takes token ids: the template is rendered here, so that what
the target saw is known token by token. The answer's ids come with `return_token_ids` (vLLM); text alone would have to be
tokenised again, and need not give the same tokens. Every sampling parameter is sent, also where it does nothing: a server
takes what is left out from the model's generation config.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from firesteel.endpoints.pool import Pool, RefusedError
from firesteel.endpoints.roster import Roster
from firesteel.errors import DataError, RecipeError, TargetError
from firesteel.recipe import Endpoints, Responders
from firesteel.responses.generate import Answer, Ask, Sampling

T = TypeVar("T")
Answers = Callable[[Ask], Awaitable[Answer]]
_LOG = "look at the server's log"
_AT_ONCE = 256  # conversations in memory, at least: enough for servers that come later
_COMPLETIONS = "/v1/completions"
_REFUSALS = (400, 413, 422)  # of a completion: this prompt is refused, mostly because it is too long, and others need not be
SHORTER = "set prompts.max_tokens or responses.max_new_tokens lower, or start the servers with a larger --max-model-len"


class Completions:
    """A client that asks for one answer. Belongs to the event loop that first uses it.

    Args:
        settings: names and times of the servers.
        sampling: the same for all answers; the seed of each comes of it and of the ask's name.
        eos_ids: tokens that end an answer.
        vocab_size: ids at or above it cannot come from the target.
        transport: replaces the network, for tests.
    """

    def __init__(
        self,
        settings: Responders,
        sampling: Sampling,
        eos_ids: Sequence[int],
        vocab_size: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.settings, self.sampling, self.eos_ids, self.vocab_size = settings, sampling, list(eos_ids), vocab_size
        self._models: dict[str, str] = {}
        key = _api_key(settings.api_key_env)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # The pool bounds what is under way and how long. A connection for each request: a kept one may be closed by the server while it is asked.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, limits=limits, headers=headers, trust_env=False, transport=transport)

    async def answer(self, endpoint: str, ask: Ask) -> Answer:
        """One answer.

        Raises:
            RecipeError: the server will never answer as the recipe wants it (another model, a wrong key).
            RefusedError: it will never answer this prompt.
            DataError: an answer came that cannot be used.
            TargetError: the server cannot be reached, is busy or fails.
        """
        body = {"model": await self._model(endpoint), "prompt": ask.token_ids, **self._sampled(ask)}
        said = await self._send(endpoint, "POST", _COMPLETIONS, body)
        try:
            choice = said["choices"][0]
            reason, ids, stopped = choice["finish_reason"], choice.get("token_ids"), choice.get("stop_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise DataError(f"{endpoint} sent no completion: {str(said)[:200]}", mend=_LOG) from None
        if reason not in ("stop", "length"):
            raise DataError(f"{endpoint} ended an answer for the reason {reason!r}", mend=_LOG)
        if ids is None:
            raise RecipeError(f"{endpoint} sends no token ids", mend="it must know `return_token_ids`, as vLLM from 0.10.2 on does")
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < self.vocab_size for i in ids) or len(ids) > self.sampling.max_new_tokens + 1:
            raise DataError(f"{endpoint} sent what cannot be {self.sampling.max_new_tokens} tokens of a vocabulary of {self.vocab_size}: {str(ids)[:80]}")
        return self._ended(endpoint, ids, reason, stopped)

    async def close(self) -> None:
        await self._http.aclose()

    def _sampled(self, ask: Ask) -> dict[str, Any]:
        s = self.sampling
        body: dict[str, Any] = {"max_tokens": s.max_new_tokens, "temperature": s.temperature, "top_p": s.top_p, "top_k": -1 if s.top_k is None else s.top_k}
        body |= {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "stream": False}
        body |= {"stop_token_ids": self.eos_ids, "return_token_ids": True, "skip_special_tokens": False}
        if s.temperature > 0:
            digest = hashlib.sha256(f"{s.seed}/{ask.name}".encode()).digest()
            body["seed"] = int.from_bytes(digest[:8], "little") >> 1
        return body

    def _ended(self, endpoint: str, ids: list[int], reason: str, stopped: Any) -> Answer:
        """With its end token: a server may leave it out, then it is the one that it names, or the only one there is."""
        if reason == "stop" and (not ids or ids[-1] not in self.eos_ids):
            if stopped in self.eos_ids:
                ids = [*ids, stopped]
            elif len(self.eos_ids) == 1 and stopped is None:
                ids = [*ids, self.eos_ids[0]]
            else:
                raise DataError(f"{endpoint} ended an answer with {ids[-1:]}, stop reason {stopped!r}; the target ends its with one of {self.eos_ids}")
        return Answer(ids, reason)

    async def _model(self, endpoint: str) -> str:
        """The target's name at a server."""
        if endpoint not in self._models:
            listed = await self._send(endpoint, "GET", "/v1/models", None)
            try:
                names = [str(row["id"]) for row in listed["data"]]
            except (KeyError, TypeError):
                raise DataError(f"{endpoint} does not list its models: {str(listed)[:200]}", mend="is it an OpenAI-compatible server?") from None
            wanted = self.settings.model
            if wanted is None and len(names) != 1:
                raise RecipeError(f"{endpoint} serves {', '.join(names) or 'nothing'}", mend="say which is the target: responses.servers.model=NAME")
            if wanted is not None and wanted not in names:
                raise RecipeError(f"{endpoint} serves {', '.join(names) or 'nothing'}, not responses.servers.model={wanted}")
            self._models[endpoint] = names[0] if wanted is None else wanted
        return self._models[endpoint]

    async def _send(self, endpoint: str, method: str, path: str, body: Any) -> Any:
        try:
            response = await self._http.request(method, endpoint + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise TargetError(f"{endpoint} cannot be reached: {e or type(e).__name__}", mend="is the server running?") from None
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise TargetError(f"{endpoint} failed: {response.status_code} {_reason(response)}", mend=_LOG)
        if response.status_code >= 400:
            self._models.pop(endpoint, None)
            said = f"{endpoint} refuses: {response.status_code} {_reason(response)}"
            if path == _COMPLETIONS and response.status_code in _REFUSALS:
                raise RefusedError(said, mend=SHORTER)
            raise RecipeError(said)
        try:
            return response.json()
        except ValueError:
            raise DataError(f"{endpoint} answered what is not JSON: {response.text[:80]!r}", mend="is it an OpenAI-compatible server?") from None


def run_conversations(
    jobs: Sequence[T], talk: Callable[[T, Answers], Awaitable[None]], client: Callable[[], Completions], urls: Sequence[str], what: str
) -> None:
    """Hold all conversations at all servers at once; `talk` holds one and asks for one answer after the other.

    Args:
        client: makes the client, in the event loop.
        urls: the servers.
        what: an answer's name, for errors.

    Raises:
        FiresteelError: a budget of `responses.servers` is used up; the message has the last error. `RefusedError` is raised in `talk`, and
            ends all only if it lets it pass.
    """
    asyncio.run(_run(jobs, talk, client, urls, what))


async def _run(jobs: Sequence[T], talk: Callable[[T, Answers], Awaitable[None]], client: Callable[[], Completions], urls: Sequence[str], what: str) -> None:
    completions = client()
    settings = Endpoints(**completions.settings.model_dump(include=set(Endpoints.model_fields)))
    pool: Pool[Ask, Answer] = Pool(completions.answer, Roster(urls), settings, what)
    pool.start()

    async def ask(question: Ask) -> Answer:
        return await pool.submit(question, size=len(question.token_ids) + completions.sampling.max_new_tokens, name=question.name)

    async def work(todo: Any) -> None:
        for job in todo:
            await talk(job, ask)

    todo = iter(jobs)
    at_once = min(len(jobs), max(_AT_ONCE, 2 * settings.concurrency * len(urls)))
    workers = [asyncio.ensure_future(work(todo)) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await pool.close()
        await completions.close()


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise RecipeError(f"the environment variable {variable} is not set", mend="set it, or leave out responses.servers.api_key_env")
    return key


def _reason(response: httpx.Response) -> str:
    try:
        said = response.json()
        inner = said.get("error", said)
        return str(inner.get("message", inner))[:300]
    except (ValueError, AttributeError):
        return response.text[:300]
