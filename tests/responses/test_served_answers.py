"""Answers from a server: what is asked, what is made of what comes, and what is done about what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from firesteel.endpoints.pool import RefusedError
from firesteel.errors import DataError, FiresteelError, RecipeError, TargetError
from firesteel.recipe import Responders
from firesteel.responses.generate import Answer, Ask, Sampling
from firesteel.responses.served import Answers, Completions, run_conversations

EOS, VOCAB = [2, 7], 50
QUICK: dict[str, Any] = {"timeout": 20.0, "backoff": 0.01, "backoff_max": 0.05, "outage": 40.0, "retries": 3, "concurrency": 4}


def completion(ids: Any, reason: Any = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": "", "finish_reason": reason, "token_ids": ids, **more}]}


class Fake:
    """A server as an httpx transport: `reply` gives what a request for a completion gets, number by number."""

    def __init__(self, reply: Callable[[int, dict[str, Any]], Any], models: Any = ("tiny",)) -> None:
        self.reply, self.models, self.asked = reply, models, []
        self.flying = self.most = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": m} for m in self.models]})
        body = json.loads(request.content)
        number = len(self.asked)
        self.asked.append(body)
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            await asyncio.sleep(0.001)
            said = self.reply(number, body)
            if said == "hang":
                await asyncio.sleep(1000)
        finally:
            self.flying -= 1
        if isinstance(said, Exception):
            raise said
        return said if isinstance(said, httpx.Response) else httpx.Response(200, json=said)


def ask_all(fake: Fake, count: int = 1, sampling: Sampling | None = None, **settings: Any) -> list[Answer]:
    answers: list[Answer] = []

    async def talk(job: int, ask: Answers) -> None:
        answers.append(await ask(Ask(f"job{job}", [1, 3 + job])))

    def client() -> Completions:
        return Completions(Responders(**{**QUICK, **settings}), sampling or Sampling(5), EOS, VOCAB, transport=httpx.MockTransport(fake))

    run_conversations(list(range(count)), talk, client, ["http://one", "http://two"], "answer")
    return answers


def test_the_request_says_everything_and_sends_token_ids() -> None:
    fake = Fake(lambda n, body: completion([9, 2]))
    assert ask_all(fake, sampling=Sampling(5, 0.7, 0.9, 20, seed=3)) == [Answer([9, 2], "stop")]
    body = fake.asked[0]
    assert body["prompt"] == [1, 3]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["top_k"], body["model"]) == (5, 0.7, 0.9, 20, "tiny")
    assert (body["repetition_penalty"], body["min_p"], body["stop_token_ids"], body["return_token_ids"]) == (1.0, 0.0, EOS, True)
    assert 0 <= body["seed"] < 2**63
    ask_all(fake)
    assert fake.asked[1]["top_k"] == -1
    assert "seed" not in fake.asked[1], "greedy answers need none"


def test_seeds_differ_by_name_and_are_the_same_again() -> None:
    fake = Fake(lambda n, body: completion([2]))
    for _ in range(2):
        ask_all(fake, 3, Sampling(5, 1.0, seed=1))
    seeds = {tuple(b["prompt"]): b["seed"] for b in fake.asked}
    assert len(set(seeds.values())) == 3
    assert all(seeds[tuple(b["prompt"])] == b["seed"] for b in fake.asked)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (completion([9, 7]), Answer([9, 7], "stop")),
        (completion([9], stop_reason=7), Answer([9, 7], "stop")),  # the end token left out
        (completion([9, 9, 9, 9, 9], "length"), Answer([9, 9, 9, 9, 9], "length")),
        (completion([9], "length"), Answer([9], "length")),  # cut by the server's own longest length
    ],
)
def test_answers_end_as_the_target_ends_them(said: dict[str, Any], wanted: Answer) -> None:
    assert ask_all(Fake(lambda n, body: said)) == [wanted]


GARBAGE = {
    "html": httpx.Response(200, text="<html>"),
    "no choice": {"choices": []},
    "a list": [1],
    "aborted": completion([9], "abort"),
    "words": completion(["a"]),
    "beyond the vocabulary": completion([50]),
    "too long": completion([9] * 20),
    "another end": completion([9], stop_reason="</s>"),
}
FAULTS: dict[str, Any] = {
    "busy": httpx.Response(429, json={"error": {"message": "slow down"}}),
    "broken": httpx.Response(500, text="oops"),
    "hang": "hang",
    "gone": httpx.ConnectError("refused"),
}


@pytest.mark.parametrize("name", [*GARBAGE, *FAULTS])
def test_what_goes_wrong_once_is_asked_again(name: str) -> None:
    said = {**GARBAGE, **FAULTS}[name]
    fake = Fake(lambda n, body: said if n == 1 else completion([9, 2]))
    assert ask_all(fake, 6, timeout=1.0) == [Answer([9, 2], "stop")] * 6
    assert len(fake.asked) == 7


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (FAULTS["busy"], TargetError, "slow down"),
        (FAULTS["broken"], TargetError, "oops"),
        (FAULTS["hang"], TargetError, "no answer within 0.3 s"),
        (FAULTS["gone"], TargetError, "refused"),
        (GARBAGE["html"], DataError, "not JSON"),
        (GARBAGE["aborted"], DataError, "abort"),
        (completion(None), RecipeError, "return_token_ids"),
        (httpx.Response(404, json={"error": {"message": "no such model"}}), RecipeError, "no such model"),
        (httpx.Response(401, json={"error": {"message": "who are you"}}), RecipeError, "who are you"),
        (httpx.Response(400, json={"message": "maximum context length is 64"}), RefusedError, "context length is 64(.|\n)*--max-model-len"),
        (httpx.Response(413, text="too large"), RefusedError, "413 too large"),
        (httpx.Response(422, text="no"), RefusedError, "422 no"),
    ],
)
def test_what_goes_wrong_for_ever_stops_with_the_last_error(reply: Any, kind: type[FiresteelError], words: str) -> None:
    with pytest.raises(kind, match=words):
        ask_all(Fake(lambda n, body: reply), 6, timeout=0.3, outage=0.6)


class Short(Fake):
    """Server `one` refuses every prompt but the first job's."""

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == "one" and request.method == "POST" and json.loads(request.content)["prompt"] != [1, 3]:
            return httpx.Response(400, json={"message": "too long"})
        return await super().__call__(request)


def test_a_prompt_that_one_server_refuses_is_answered_by_the_other() -> None:
    assert ask_all(Short(lambda n, body: completion([9, 2])), 12) == [Answer([9, 2], "stop")] * 12


def test_a_wrong_model_is_named_with_what_is_there() -> None:
    fake = Fake(lambda n, body: completion([2]), models=("a", "b"))
    with pytest.raises(RecipeError, match=r"serves a, b, not responses\.servers\.model=c"):
        ask_all(fake, model="c")
    with pytest.raises(RecipeError, match=r"serves a, b\n.*responses\.servers\.model=NAME"):
        ask_all(fake)
    assert ask_all(fake, model="b") == [Answer([2], "stop")]
    assert fake.asked[-1]["model"] == "b"


def test_many_are_asked_at_once_and_no_more_than_allowed() -> None:
    fake = Fake(lambda n, body: completion([2]))
    assert len(ask_all(fake, 40)) == 40
    assert fake.most == 8  # four at each of two servers


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(RecipeError, match="SOME_KEY"):
        ask_all(Fake(lambda n, body: completion([2])), api_key_env="SOME_KEY")
