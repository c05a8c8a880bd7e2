"""An OpenAI-compatible server with known speed that streams words and counts drafts, and a client that measures it without guidellm."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from typing import Any

import httpx

from firesteel.evaluation.bench_schema import Answer, Load
from firesteel.serving.load import Generator, LoadPlan


class FakeServer:
    """Answers of `tokens` tokens: the first after `ttft` seconds, then `1 + accepted` every `step` seconds.

    Args:
        slope: a step takes `1 + slope * (requests under way - 1)` times as long.
        drafted, accepted: drafts of a round; with `drafted=None` there are no counters, as without a drafter.
        metrics: False answers /metrics with 404.
        most: requests under way from which further ones get status 503.
        usage: False leaves out how many tokens there were.
        key: refuses requests without it.
        cached: share of prompt tokens that its prefix cache claims.
    """

    def __init__(
        self,
        *,
        tokens: int = 13,
        ttft: float = 0.02,
        step: float = 0.01,
        slope: float = 0.0,
        drafted: int | None = None,
        accepted: int = 0,
        metrics: bool = True,
        most: int | None = None,
        usage: bool = True,
        key: str | None = None,
        cached: float = 0.0,
        model: str = "tiny",
    ) -> None:
        self.tokens, self.ttft, self.step, self.slope = tokens, ttft, step, slope
        self.drafted, self.accepted, self.metrics, self.most, self.usage = drafted, accepted, metrics, most, usage
        self.key, self.cached, self.model = key, cached, model
        self.asked: list[dict[str, Any]] = []
        self.rounds = self.generated = self.prompt_tokens = self.under_way = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)

    @property
    def prompts(self) -> list[str]:
        """The first turn of every request."""
        return [body["messages"][0]["content"] if "messages" in body else body["prompt"] for body in self.asked]

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                fields = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
                body = json.loads(await reader.readexactly(int(fields.get("content-length", 0))) or b"null")
                if self.key is not None and fields.get("authorization") != f"Bearer {self.key}":
                    _say(writer, 401, {"error": "wrong key"})
                elif path == "/v1/models":
                    _say(writer, 200, {"data": [{"id": self.model, "owned_by": "fake"}]})
                elif path == "/metrics":
                    _say(writer, 200, self._page()) if self.metrics else _say(writer, 404, {"error": "none"})
                elif self.most is not None and self.under_way >= self.most:
                    self.asked.append(body)
                    _say(writer, 503, {"error": "busy"})
                else:
                    self.asked.append(body)
                    await self._answer(writer, body, "/chat/" in path)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool) -> None:
        wanted = min(self.tokens, body.get("max_completion_tokens") or body.get("max_tokens") or self.tokens)
        stream = body.get("stream", False)
        if stream:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.under_way += 1
        try:
            due, done = time.monotonic() + self.ttft, 0
            while done < wanted:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                now = min(1 if done == 0 else 1 + self.accepted, wanted - done)
                if done and self.drafted is not None:
                    self.rounds += 1
                done += now
                due += self.step * (1 + self.slope * (self.under_way - 1))
                if stream:
                    _event(writer, {"choices": [{"index": 0, **({"delta": {"content": "a " * now}} if chat else {"text": "a " * now})}]})
                    await writer.drain()
        finally:
            self.under_way -= 1
        self.generated += wanted
        self.prompt_tokens += 7
        usage = {"prompt_tokens": 7, "completion_tokens": wanted, "total_tokens": 7 + wanted}
        if stream:
            if self.usage:
                _event(writer, {"choices": [], "usage": usage})
            _event(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
        else:
            _say(writer, 200, {"choices": [], "usage": usage})

    def _page(self) -> str:
        lines = [
            f'vllm:generation_tokens_total{{model_name="m"}} {self.generated}',
            f"vllm:prefix_cache_queries_total {self.prompt_tokens}",
            f"vllm:prefix_cache_hits_total {self.cached * self.prompt_tokens}",
        ]
        if self.drafted is not None:
            prefix = "vllm:spec_decode_num_"
            lines += [f"{prefix}drafts_total {self.rounds}", f"{prefix}draft_tokens_total {self.drafted * self.rounds}"]
            lines += [f"{prefix}accepted_tokens_total {self.accepted * self.rounds}"]
            lines += [f'{prefix}accepted_tokens_per_pos_total{{position="{k}"}} {self.rounds * (k < self.accepted)}' for k in range(self.drafted)]
        return "\n".join(lines) + "\n"


def drive_directly(_: Generator, plan: LoadPlan) -> Load:
    """What guidellm does, in threads of this process."""
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for request in plan.requests:
        todo.put(request)
    answers: list[Answer] = []
    failures: dict[str, int] = {}
    path, field = ("/v1/chat/completions", "messages") if plan.api == "chat" else ("/v1/completions", "prompt")

    def user() -> None:
        with httpx.Client(timeout=plan.timeout, trust_env=False) as client:
            while True:
                try:
                    request = todo.get_nowait()
                except queue.Empty:
                    return
                body = {"model": plan.model, "stream": True, "max_completion_tokens": plan.max_new_tokens, field: request, **plan.body}
                start, marks, tokens = time.time(), [], 0
                with client.stream("POST", f"{plan.url}{path}", json=body) as stream:
                    if stream.status_code != 200:
                        what = f"HTTP {stream.status_code}"
                        failures[what] = failures.get(what, 0) + 1
                        continue
                    for line in stream.iter_lines():
                        if '"delta"' in line or '"text"' in line:
                            marks.append(time.time())
                        elif '"usage"' in line:
                            tokens = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
                answers.append(Answer(start=start, first=marks[0], last=marks[-1], end=time.time(), prompt_tokens=7, tokens=tokens, chunks=len(marks)))

    users = [threading.Thread(target=user) for _ in range(plan.concurrency)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    return Load(answers=answers, failures=failures)


def _say(writer: asyncio.StreamWriter, status: int, what: dict[str, Any] | str) -> None:
    data = (what if isinstance(what, str) else json.dumps(what)).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def _event(writer: asyncio.StreamWriter, what: dict[str, Any] | str) -> None:
    data = f"data: {what if isinstance(what, str) else json.dumps(what)}\n\n".encode()
    writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
