"""What a client gets that asks for too much, for something else, or for nonsense: a proper status in OpenAI's shape, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from server_toys import EOS, NAME, SERVED, Brake, Running, alone, decode, running

from firesteel.errors import TargetError
from firesteel.serving.server import Server
from firesteel.serving.service import Served

PROMPT = [5, 9, 17]
CHAT = {"messages": [{"role": "user", "content": "f5"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(max_body=20_000) as found:
        yield found


def post(server: Running, body: Any, path: str = "completions", **more: Any) -> httpx.Response:
    with server.client() as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return client.post(f"/v1/{path}", content=content, **more)


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error's body, after checks of its shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("completions", {}, "prompt", "prompt is missing"),
        ("completions", {"prompt": 5}, "prompt", "must be a text, a list of token ids"),
        ("completions", {"prompt": []}, "prompt", "has no tokens"),
        ("completions", {"prompt": ""}, "prompt", "has no tokens"),
        ("completions", {"prompt": [[1], []]}, "prompt", "has no tokens"),
        ("completions", {"prompt": [1, -4]}, "prompt", "must be"),
        ("completions", {"prompt": [1, 4000]}, "prompt", "token id 4000; the model has 40 tokens"),
        ("completions", {"prompt": [10**30]}, "prompt", "the model has 40 tokens"),
        ("completions", {"prompt": "unheard"}, "prompt", "the toy has no word"),
        ("completions", {"prompt": PROMPT, "max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
        ("completions", {"prompt": PROMPT, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ("completions", {"prompt": PROMPT, "max_tokens": "8"}, "max_tokens", "valid integer"),
        ("completions", {"prompt": PROMPT, "max_tokens": True}, "max_tokens", "valid integer"),
        ("completions", {"prompt": PROMPT, "temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ("completions", {"prompt": PROMPT, "temperature": 1e9}, "temperature", "less than or equal to 2"),
        ("completions", {"prompt": PROMPT, "top_p": 0}, "top_p", "greater than 0"),
        ("completions", {"prompt": PROMPT, "top_p": 1.1}, "top_p", "less than or equal to 1"),
        ("completions", {"prompt": PROMPT, "top_k": -2}, "top_k", "greater than or equal to -1"),
        ("completions", {"prompt": PROMPT, "min_p": 2}, "min_p", "less than or equal to 1"),
        ("completions", {"prompt": PROMPT, "n": 0}, "n", "greater than or equal to 1"),
        ("completions", {"prompt": PROMPT, "n": 10**6}, "n", "less than or equal to 128"),
        ("completions", {"prompt": [[5]] * 300}, "n", "300 answers in one request; this server has room for 260"),
        ("completions", {"prompt": [[5]] * 3, "n": 100}, "n", "300 answers in one request"),
        ("completions", {"prompt": PROMPT, "seed": 2**70}, "seed", "less than or equal to"),
        ("completions", {"prompt": PROMPT, "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ("completions", {"prompt": PROMPT, "stop": ["a", "b", "c", "d", "e"]}, "stop", "up to 4"),
        ("completions", {"prompt": PROMPT, "stop": ""}, "stop", "not empty"),
        ("completions", {"prompt": PROMPT, "echo": True}, "echo", "echo is not supported"),
        ("completions", {"prompt": PROMPT, "presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ("completions", {"prompt": PROMPT, "frequency_penalty": -1}, "frequency_penalty", "not supported"),
        ("completions", {"prompt": PROMPT, "logit_bias": {"5": 3}}, "logit_bias", "not supported"),
        ("completions", {"prompt": PROMPT, "min_tokens": 5}, "min_tokens", "not supported"),
        ("completions", {"prompt": PROMPT, "best_of": 3}, "best_of", "not supported"),
        ("completions", {"prompt": PROMPT, "stream_options": {"include_usage": True}}, "stream_options", "only for stream=true"),
        ("completions", {"prompt": PROMPT, "guided_json": {}}, "guided_json", "unknown parameter guided_json"),
        ("chat/completions", {"messages": []}, "messages", "at least 1 item"),
        ("chat/completions", {"messages": [{"role": "king", "content": "f5"}]}, "messages", "'system', 'developer'"),
        ("chat/completions", {"messages": [{"role": "system", "content": "f5"}]}, "messages", "no user turn"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "should be 'text' (got 'image')"),
        ("chat/completions", {"messages": [{"role": "user", "content": "unheard"}]}, "messages", "the toy has no word"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format", "only text is"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice", "not supported"),
        ("chat/completions", {**CHAT, "top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
        ("chat/completions", {**CHAT, "reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ("chat/completions", {**CHAT, "prompt": "f5"}, "prompt", "unknown parameter prompt"),
    ],
    ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else None,
)
def test_parameters_out_of_range_or_unsupported(server: Running, path: str, body: dict[str, Any], param: str, words: str) -> None:
    error = refused(post(server, body, path), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b'{"prompt": "f5", "temperature": NaN}',
        b'{"prompt": "f5", "temperature": Infinity}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 15_000,
        b'{"prompt": [[' + b"[" * 5_000 + b"]" * 5_000 + b"]]}",
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda b: repr(b[:20]),
)
def test_malformed_json(server: Running, body: bytes) -> None:
    error = refused(post(server, body), 400)
    assert len(error["message"]) < 400, "a huge input is not sent back"


def test_neutral_values_and_extremes_are_accepted(server: Running) -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "min_tokens": 0, "stop": None, "best_of": 1}
    extreme = {"temperature": 1e-300, "top_k": 10**30, "top_p": 1e-9, "min_p": 0, "seed": -(2**63) + 1}
    answer = post(server, {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "user": "u", **neutral, **extreme})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == decode([t for t in alone(PROMPT, 8, eos=False) if t != EOS])


def test_a_prompt_over_the_limit_says_so_in_openais_words(server: Running) -> None:
    longest = server.engine.max_length
    error = refused(post(server, {"prompt": [5] * longest}), 400)
    assert error["code"] == "context_length_exceeded"
    error = refused(post(server, {"prompt": PROMPT, "max_tokens": 10**12}), 400)
    assert error["code"] == "context_length_exceeded"
    assert f"longest context is {longest} tokens" in error["message"]
    error = refused(post(server, {**CHAT, "max_completion_tokens": longest}, "chat/completions"), 400)
    assert error["code"] == "context_length_exceeded"
    assert post(server, {"prompt": [5] * (longest - 1), "max_tokens": 1}).status_code == 200


def test_unknown_models_routes_and_methods(server: Running) -> None:
    error = refused(post(server, {"model": "gpt-9", "prompt": PROMPT}), 404)
    assert error["code"] == "model_not_found"
    with server.client() as client:
        assert refused(client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
        refused(client.get("/v1/embeddings"), 404)
        refused(client.get("/v1/completions"), 405)
        assert client.get("/docs").status_code == 404


def test_bodies_over_the_limit(server: Running) -> None:
    for size in (20_001, 100_000, 400_000):
        assert refused(post(server, b" " * size), 413)["code"] == "body_too_large"

    def parts() -> Iterator[bytes]:  # no length is declared
        for _ in range(30):
            yield b" " * 1000

    with server.client() as client:
        refused(client.post("/v1/completions", content=parts()), 413)
    assert post(server, {"prompt": PROMPT}).status_code == 200


def test_api_keys() -> None:
    with running(api_key="sesame") as locked, locked.client() as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "sesame"},
            {"Authorization": "Basic sesame"},
            {"Authorization": b"Bearer \xff\xe9"},
        ):
            for answer in (client.post("/v1/completions", json={"prompt": PROMPT}, headers=headers), client.get("/v1/models", headers=headers)):  # type: ignore[arg-type]
                error = refused(answer, 401)
                assert error["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200
        assert client.get("/health").status_code == client.get("/metrics").status_code == client.get("/").status_code == 200


def test_a_full_queue_turns_requests_away_and_takes_them_again() -> None:
    brake = Brake(0.05)
    with running(brake=brake, requests=1, max_queue=1) as small, small.client() as client:
        with client.stream("POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}) as first:
            waiting = threading.Thread(target=post, args=(small, {"prompt": PROMPT, "max_tokens": 1}))
            waiting.start()
            while small.service.thread.open < 2:
                time.sleep(0.01)
            answer = post(small, {"prompt": PROMPT})
            assert refused(answer, 429)["code"] == "queue_full"
            assert answer.headers["retry-after"] == "1"
            assert "vllm:num_requests_waiting" in client.get("/metrics").text
            assert f'vllm:num_requests_waiting{{model_name="{NAME}"}} 1' in client.get("/metrics").text
            brake.seconds = 0
            first.read()
        waiting.join()
        assert post(small, {"prompt": PROMPT, "max_tokens": 1}).status_code == 200


def test_time_per_request_is_limited() -> None:
    brake = Brake(0.05)
    with running(brake=brake, request_seconds=0.3) as slow:
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        answer = post(slow, body)
        assert refused(answer, 504)["code"] == "request_timeout"
        assert answer.headers["x-should-retry"] == "false", "or the official client would try again by itself"
        with slow.client() as client, client.stream("POST", "/v1/completions", json={**body, "stream": True}) as begun:
            events = [line for line in begun.iter_lines() if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "request_timeout"
        slow.settle()


def test_a_body_that_does_not_come_is_given_up() -> None:
    with running(request_seconds=0.4) as server:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body[:-5])
            begin = time.monotonic()
            answer = HTTPResponse(client)
            answer.begin()
            assert 0.3 < time.monotonic() - begin < 20
            assert answer.status == 408
            error = json.loads(answer.read())["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"] == "the body did not come within 0.4 s"
        server.settle()
        assert post(server, body).status_code == 200


def test_a_client_that_goes_away_is_forgotten_and_others_are_not_disturbed() -> None:
    brake = Brake(0.02)
    with running(brake=brake, requests=3) as server:
        body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True}
        kept: list[httpx.Response] = []
        other = threading.Thread(target=lambda: kept.append(post(server, {"prompt": [7, 8], "max_tokens": 60, "ignore_eos": True, "temperature": 0})))
        with server.client() as client, client.stream("POST", "/v1/completions", json={**body, "stream": True}) as leaving:
            other.start()
            next(leaving.iter_lines())
        # One that waits for a whole answer leaves, too.
        with pytest.raises(httpx.ReadTimeout), server.client() as client:
            client.post("/v1/completions", json=body, timeout=0.3)
        other.join()
        server.settle()
        assert kept[0].json()["choices"][0]["text"] == decode([t for t in alone([7, 8], 60, eos=False) if t != EOS])
        with server.client() as client:
            assert f'vllm:request_success_total{{model_name="{NAME}",finished_reason="abort"}} 2' in client.get("/metrics").text


def test_a_broken_engine_is_said_to_everybody(caplog: pytest.LogCaptureFixture) -> None:
    brake = Brake(0.05)
    with running(brake=brake) as server, server.client() as client:
        found: list[httpx.Response] = []
        whole = threading.Thread(target=lambda: found.append(post(server, {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True})))
        whole.start()
        with client.stream("POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}) as begun:
            while server.service.thread.open < 2:
                time.sleep(0.01)
            brake.broken = True
            events = [line for line in begun.iter_lines() if line]
        whole.join()
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert "a wire came loose" in error["message"]
        assert refused(found[0], 500)["code"] == "engine_failed"
        refused(client.get("/health"), 503)
        refused(post(server, {"prompt": PROMPT}), 503)
        assert client.get("/metrics").status_code == 200
        assert any("a wire came loose" in str(r.exc_info) for r in caplog.records)


def test_a_token_that_cannot_be_decoded_ends_its_own_answer_only() -> None:
    third = alone(PROMPT, 3, eos=False)[2]

    def broken(ids: list[int]) -> str:
        if third in ids:
            raise ValueError("no such token")
        return SERVED.decode(ids)

    served = Served(NAME, SERVED.encode, SERVED.encode_chat, broken, SERVED.token_text, SERVED.token_bytes, SERVED.eos_ids, SERVED.vocab_size, 1)
    with running(served=served) as server:
        error = refused(post(server, {"prompt": PROMPT, "temperature": 0, "max_tokens": 9}), 500)
        assert "no such token" in error["message"]
        assert post(server, {"prompt": PROMPT, "temperature": 0, "max_tokens": 2}).status_code == 200
        assert server.service.thread.failed is None


def test_two_hundred_connections_at_once_are_all_answered() -> None:
    async def one(client: httpx.AsyncClient, k: int) -> str:
        body = {"prompt": [3 + k % 30, 9], "max_tokens": 6, "ignore_eos": True, "temperature": 0}
        if k % 2:
            return str((await client.post("/v1/completions", json=body)).json()["choices"][0]["text"])
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            events = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        return "".join(c["text"] for e in events[:-1] for c in json.loads(e)["choices"])

    async def all_of_them(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, limits=limits) as client:
            return await asyncio.gather(*(one(client, k) for k in range(200)))

    with running(max_queue=256) as server:
        texts = asyncio.run(all_of_them(server.url))
        wanted = {k: decode([t for t in alone([3 + k, 9], 6, eos=False) if t != EOS]) for k in range(30)}
        assert texts == [wanted[k % 30] for k in range(200)]
        server.settle()


def test_a_taken_port_is_found_out_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(TargetError, match=r"set serve\.port to a free port"):
        Server("127.0.0.1", taken.getsockname()[1])
