"""A small OpenAI-compatible server in a thread that answers with a target of this process, and fails on command."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from firesteel.responses.generate import Ask, Sampling
from firesteel.responses.generator import Generator
from firesteel.stages.line import Line


class OpenAiFake:
    """`POST /v1/completions` with token ids; every `fail_every`-th request gets status 500, a prompt of more than `longest` tokens 400.
    `answered` counts the others, `bodies` has what all of them asked."""

    def __init__(self, line: Line, *, fail_every: int = 0, stop_after: int | None = None, longest: int | None = None) -> None:
        self.line, self.fail_every, self.stop_after, self.longest = line, fail_every, stop_after, longest
        self.asked = self.answered = 0
        self.bodies: list[dict[str, Any]] = []
        self._generator = Generator(line.target.model, 1, "float32")
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> OpenAiFake:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

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
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")), 0)
                body = json.loads(await reader.readexactly(length) or b"null")
                status, said = self._answer(body)
                data = json.dumps(said).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        if body is None:
            return 200, {"data": [{"id": "tiny"}]}
        self.asked += 1
        self.bodies.append(body)
        if self.longest is not None and len(body["prompt"]) > self.longest:
            return 400, {"error": {"message": f"This model's maximum context length is {self.longest} tokens"}}
        if (self.fail_every and self.asked % self.fail_every == 0) or (self.stop_after is not None and self.answered >= self.stop_after):
            return 500, {"error": {"message": "out of order"}}
        self.answered += 1
        sampling = Sampling(body["max_tokens"])
        answer = self._generator.answers([Ask("", body["prompt"])], sampling, self.line.target.spec.eos_ids)[0]
        return 200, {"choices": [{"finish_reason": answer.finish_reason, "token_ids": answer.token_ids, "stop_reason": None}]}
