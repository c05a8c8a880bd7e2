"""Answers of the own server over plain HTTP: text, streams, usage, log-probabilities, drafts, counters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_toys import CONFIDENCES, EOS, LONGEST, NAME, Brake, Running, alone, decode, running

from firesteel.serving.counters import parse_counters

PROMPT = [5, 9, 17]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


def ask(server: Running, path: str = "completions", **body: Any) -> dict[str, Any]:
    with server.client() as client:
        answer = client.post(f"/v1/{path}", json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


def stream(server: Running, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
    with server.client() as client, client.stream("POST", f"/v1/{path}", json={"temperature": 0, "stream": True, **body}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(e) for e in events[:-1]]


def text_of(tokens: list[int]) -> str:
    return decode([t for t in tokens if t != EOS])


def test_a_completion_is_what_the_target_writes(server: Running) -> None:
    wanted = alone(PROMPT, 24)
    found = ask(server, model=NAME, prompt=PROMPT, max_tokens=24)
    choice = found["choices"][0]
    assert choice["text"] == text_of(wanted)
    assert choice["finish_reason"] == ("stop" if wanted[-1] == EOS else "length")
    assert found["usage"]["prompt_tokens"] == 3
    assert found["usage"]["completion_tokens"] == len(wanted)
    assert 0 < found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] < len(wanted)
    assert found["object"] == "text_completion"


def test_text_and_chat_prompts_and_the_default_lengths(server: Running) -> None:
    text = decode(PROMPT)
    assert ask(server, prompt=text, ignore_eos=True)["choices"][0]["text"] == text_of(alone(PROMPT, 16, eos=False)), "16 tokens, as with OpenAI"
    chat = ask(server, "chat/completions", messages=[{"role": "user", "content": [{"type": "text", "text": text}]}])
    wanted = alone([3, *PROMPT], LONGEST - 4)
    assert chat["choices"][0]["message"]["content"] == text_of(wanted)
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown = ask(server, "chat/completions", messages=[{"role": "user", "content": text}], tools=tools, max_completion_tokens=8)
    assert shown["choices"][0]["message"]["content"] == text_of(alone([4, *PROMPT], 8)), "the template is given the tools"


def test_several_prompts_and_several_choices(server: Running) -> None:
    found = ask(server, prompt=[PROMPT, [7, 8]], max_tokens=9, n=2, ignore_eos=True)
    texts = [c["text"] for c in found["choices"]]
    first, second = text_of(alone(PROMPT, 9, eos=False)), text_of(alone([7, 8], 9, eos=False))
    assert texts == [first, first, second, second]
    assert [c["index"] for c in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 5
    assert found["usage"]["completion_tokens"] == 36


def test_a_seed_repeats_and_choices_differ(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1, "seed": 11, "n": 3, "top_p": 0.95, "top_k": 30, "min_p": 0.001}
    first, second = ask(server, **body), ask(server, **body)
    assert [c["text"] for c in first["choices"]] == [c["text"] for c in second["choices"]]
    assert len({c["text"] for c in first["choices"]}) == 3
    one = ask(server, **{**body, "n": 1})
    assert one["choices"][0]["text"] == first["choices"][0]["text"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_says_the_same_as_a_whole_answer(server: Running, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": decode(PROMPT)}]}
    body = {**prompt, "max_tokens": 40, "n": 2, "stop": ["h33 g"], "logprobs": 2 if path == "completions" else True}
    whole = ask(server, path, **body)
    chunks = stream(server, path, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks[:-1])
    assert len({c["id"] for c in chunks}) == 1
    for index, choice in enumerate(whole["choices"]):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        if path == "completions":
            assert "".join(c["text"] for c in mine) == choice["text"]
            for name, values in choice["logprobs"].items():
                assert [x for c in mine for x in c["logprobs"][name]] == values
        else:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
            assert [x for c in mine if c["logprobs"] for x in c["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_usage_of_every_chunk_where_it_is_wanted(server: Running) -> None:
    chunks = stream(server, prompt=PROMPT, max_tokens=12, ignore_eos=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert "usage" not in stream(server, prompt=PROMPT, max_tokens=2)[0]


def test_stop_strings_end_the_text_before_them(server: Running) -> None:
    full = text_of(alone(PROMPT, 40, eos=False))
    middle = full[len(full) // 2 : len(full) // 2 + 4]
    cut = full[: full.index(middle)]
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stop": middle}
    found = ask(server, **body)["choices"][0]
    assert (found["text"], found["finish_reason"]) == (cut, "stop")
    assert ask(server, **body, include_stop_str_in_output=True)["choices"][0]["text"] == cut + middle
    chunks = stream(server, **body)
    assert "".join(c["choices"][0]["text"] for c in chunks) == cut
    third = alone(PROMPT, 3, eos=False)
    assert ask(server, prompt=PROMPT, max_tokens=9, stop_token_ids=[third[-1]])["choices"][0]["text"] == text_of(third[:2])


def test_logprobs_of_both_apis(server: Running) -> None:
    wanted = alone(PROMPT, 10, eos=False)
    body = {"max_tokens": 10, "ignore_eos": True}
    old = ask(server, prompt=PROMPT, logprobs=3, **body)["choices"][0]
    assert len(old["logprobs"]["tokens"]) == 10
    assert all(p <= 0 for p in old["logprobs"]["token_logprobs"])
    assert all(max(top.values()) == p for top, p in zip(old["logprobs"]["top_logprobs"], old["logprobs"]["token_logprobs"], strict=True)), "greedy"
    assert old["logprobs"]["text_offset"][0] == 0
    for offset, token in zip(old["logprobs"]["text_offset"], wanted, strict=True):
        if token > 2:
            assert old["text"][offset:].startswith(decode([token]))
    new = ask(server, "chat/completions", messages=[{"role": "user", "content": decode(PROMPT)}], logprobs=True, top_logprobs=2, **body)
    for token in new["choices"][0]["logprobs"]["content"]:
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
    plain = ask(server, prompt=PROMPT, logprobs=3, speculate=False, **body)["choices"][0]
    assert plain["logprobs"]["token_logprobs"] == pytest.approx(old["logprobs"]["token_logprobs"])


def test_logprobs_have_the_bytes_of_tokens_that_are_a_part_of_a_character(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": decode(PROMPT)}], "logprobs": True, "top_logprobs": 20, "max_tokens": 60, "ignore_eos": True}
    found = [ask(server, "chat/completions", **body, temperature=1, seed=s)["choices"][0] for s in range(4)]
    for choice in found:
        whole = b"".join(bytes(t["bytes"]) for t in choice["logprobs"]["content"] if t["token"] != "<eos>")
        assert whole.decode(errors="replace") == choice["message"]["content"]
    entries = [e for c in found for t in c["logprobs"]["content"] for e in (t, *t["top_logprobs"])]
    assert {tuple(e["bytes"]) for e in entries if e["token"] == "\ufffd"} == {(0xC3,), (0xA9,)}


def test_records_tell_drafted_tokens_and_add_up_to_the_text(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "firesteel": True}
    chunks = [c["choices"][0] for c in stream(server, **body)]
    for chunk in chunks:
        assert "".join(t["text"] for t in chunk["firesteel"]["tokens"]) == chunk["text"]
    tokens = [t for c in chunks for t in c["firesteel"]["tokens"]]
    assert len(tokens) == 60
    assert any(t["drafted"] for t in tokens)
    assert all(t["confidence"] in (CONFIDENCES if t["drafted"] else (None,)) for t in tokens)
    steps, rounds = (sum(c["firesteel"][k] for c in chunks) for k in ("steps", "rounds"))
    assert steps + sum(c["firesteel"]["accepted"] for c in chunks) == 60
    assert 0 < rounds < steps, "the first token comes with the prompt"
    plain = ask(server, **body, speculate=False)["choices"][0]
    assert plain["text"] == "".join(c["text"] for c in chunks)
    assert not any(t["drafted"] for t in plain["firesteel"]["tokens"])
    assert (plain["firesteel"]["rounds"], plain["firesteel"]["steps"]) == (0, 60)


def test_models_and_health(server: Running) -> None:
    with server.client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert [m["id"] for m in listed] == [NAME]
        assert client.get(f"/v1/models/{NAME}").json() == listed[0]
        assert listed[0]["max_model_len"] == server.engine.max_length
        assert client.get("/health").json() == {"status": "ok"}


def test_metrics_have_vllms_names_and_count() -> None:
    with running() as fresh, fresh.client() as client:
        before = parse_counters(client.get("/metrics").text)
        assert before is not None
        assert (before.drafts, before.by_position) == (0, (0, 0, 0))
        found = ask(fresh, prompt=PROMPT, max_tokens=40, ignore_eos=True)
        stream(fresh, prompt=[7], max_tokens=10, ignore_eos=True)
        page = client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        counters = parse_counters(page.text)
        engine = fresh.engine.counters
        assert counters is not None
        assert (counters.drafts, counters.drafted, counters.accepted) == (engine.rounds, engine.drafted, engine.accepted)
        assert counters.by_position == tuple(engine.by_position)
        details = found["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] <= counters.accepted
        families = {f.name: f for f in text_string_to_metric_families(page.text)}
        values = {(s.name, s.labels.get("finished_reason")): s.value for f in families.values() for s in f.samples if "le" not in s.labels}
        assert all(s.labels["model_name"] == NAME for f in families.values() for s in f.samples)
        for name, value in {
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
            "vllm:prompt_tokens_total": 4,
            "vllm:generation_tokens_total": 50,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 2,
            "vllm:request_time_per_output_token_seconds_count": 2,
            "vllm:inter_token_latency_seconds_count": engine.steps - 2,
            "firesteel:engine_steps_total": engine.steps,
            "firesteel:engine_step_tokens_total": engine.step_tokens,
        }.items():
            assert values[name, None] == value, name
        assert values["vllm:request_success_total", "length"] == 2
        assert values["vllm:request_success_total", "abort"] == 0
        assert {"vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions"} <= families.keys()


def test_without_a_drafter_no_drafts_are_counted() -> None:
    with running(draft=False) as plain, plain.client() as client:
        assert ask(plain, prompt=PROMPT, max_tokens=9, ignore_eos=True)["choices"][0]["text"] == text_of(alone(PROMPT, 9, eos=False))
        assert parse_counters(client.get("/metrics").text) is None


def test_the_engine_sleeps_while_nothing_is_asked() -> None:
    brake = Brake()
    with running(brake=brake) as idle:
        ask(idle, prompt=PROMPT, max_tokens=5)
        steps = brake.steps
        ask(idle, prompt=PROMPT, max_tokens=5)
        assert brake.steps == 2 * steps
