"""The official client against the own server: what it sends is understood, what it gets it can read, and errors become its own exceptions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from server_toys import EOS, NAME, Brake, Running, alone, decode, running

PROMPT = [5, 9, 17]
CHAT = [{"role": "user", "content": "f5 j9 r17"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


def client_of(server: Running, *, key: str = "none", retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=retries, timeout=120, http_client=httpx.Client(trust_env=False))


@pytest.fixture
def client(server: Running) -> OpenAI:
    return client_of(server)


def text_of(tokens: list[int]) -> str:
    return decode([t for t in tokens if t != EOS])


def test_whole_answers(client: OpenAI) -> None:
    wanted = alone([3, *PROMPT], 30)
    chat = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, max_completion_tokens=30)  # type: ignore[call-overload]
    assert chat.choices[0].message.content == text_of(wanted)
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage.completion_tokens == len(wanted)
    assert chat.usage.completion_tokens_details.accepted_prediction_tokens > 0
    old = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=30)
    assert old.choices[0].text == text_of(alone(PROMPT, 30))
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "firesteel"


def test_streams(client: OpenAI) -> None:
    wanted = alone([3, *PROMPT], 30)
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            model=NAME, messages=CHAT, temperature=0, max_tokens=30, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(wanted)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len(wanted)
    old = client.completions.create(model=NAME, prompt="f5 j9 r17", temperature=0, max_tokens=30, stream=True)
    assert "".join(c.choices[0].text for c in old) == text_of(alone(PROMPT, 30))


def test_the_helper_that_puts_streams_together_agrees(client: OpenAI) -> None:
    stop = text_of(alone([3, *PROMPT], 30))[20:24]  # the helper raises where an answer was cut by its length
    with client.chat.completions.stream(model=NAME, messages=CHAT, temperature=0, stop=stop, logprobs=True) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, stop=stop, logprobs=True)  # type: ignore[call-overload]
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs == whole.choices[0].logprobs


def test_seeds_stops_and_logprobs(client: OpenAI) -> None:
    def sampled(seed: int) -> str:
        found = client.completions.create(model=NAME, prompt=PROMPT, temperature=1, seed=seed, max_tokens=20)
        return str(found.choices[0].text)

    assert sampled(1) == sampled(1)
    assert len({sampled(k) for k in range(5)}) > 1
    full = text_of(alone(PROMPT, 30, eos=False))
    stop = full[20:24]
    found = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=30, stop=[stop, "never"], extra_body={"ignore_eos": True})
    assert found.choices[0].text == full[: full.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    with_logprobs = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
    content = with_logprobs.choices[0].logprobs.content
    assert all(len(t.top_logprobs) == 3 and t.top_logprobs[0].token == t.token for t in content)
    old = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=8, logprobs=2)
    assert old.choices[0].logprobs is not None
    assert len(old.choices[0].logprobs.tokens or []) == len(old.choices[0].logprobs.text_offset or [])


def test_an_answer_can_be_sent_back_as_it_came(client: OpenAI) -> None:
    first = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, max_tokens=4)  # type: ignore[call-overload]
    messages = [*CHAT, first.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "f5"}]}]
    client.chat.completions.create(model=NAME, messages=messages, max_tokens=4)  # type: ignore[call-overload]


def test_errors_are_the_clients_own(server: Running, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt=[5] * 300)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=NAME, prompt=PROMPT, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=CHAT)  # type: ignore[call-overload]
    assert unknown.value.code == "model_not_found"
    with running(api_key="sesame") as locked:
        with pytest.raises(openai.AuthenticationError):
            client_of(locked, key="wrong").models.list()
        assert client_of(locked, key="sesame").models.list().data[0].id == NAME


def test_a_time_limit_is_not_tried_again() -> None:
    with running(brake=Brake(0.05), request_seconds=1.0) as slow:
        with pytest.raises(openai.InternalServerError) as late:
            client_of(slow, retries=2).completions.create(model=NAME, prompt=PROMPT, max_tokens=200, extra_body={"ignore_eos": True})
        assert late.value.status_code == 504
        slow.settle()
        assert slow.engine.counters.prompt_tokens == len(PROMPT), "asked once"


def test_a_full_queue_is_tried_again() -> None:
    brake = Brake(0.05)
    with running(brake=brake, requests=1, max_queue=0) as small:
        stream = client_of(small).completions.create(model=NAME, prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            client_of(small).completions.create(model=NAME, prompt=PROMPT, max_tokens=1)
        later = threading.Timer(0.2, stream.close)
        later.start()
        found = client_of(small, retries=8).completions.create(model=NAME, prompt=PROMPT, max_tokens=1)
        assert found.choices[0].finish_reason in ("length", "stop")
        later.join()


def test_a_broken_engine_raises_in_streams_and_before_them() -> None:
    brake = Brake(0.05)
    with running(brake=brake) as server:
        client = client_of(server)
        stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        brake.broken = True
        with pytest.raises(openai.APIError, match="a wire came loose"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as after:
            client.completions.create(model=NAME, prompt=PROMPT)
        assert after.value.status_code == 503


def test_many_streams_side_by_side_are_each_their_own(server: Running) -> None:
    async def one(client: AsyncOpenAI, k: int) -> str:
        stream = await client.completions.create(model=NAME, prompt=[3 + k, 9], temperature=0, max_tokens=20, stream=True)
        return "".join([c.choices[0].text async for c in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, http_client=httpx.AsyncClient(trust_env=False)) as client:
            return await asyncio.gather(*(one(client, k) for k in range(24)))

    assert asyncio.run(all_of_them()) == [text_of(alone([3 + k, 9], 20)) for k in range(24)]
