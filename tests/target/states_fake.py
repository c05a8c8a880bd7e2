"""A fake of a vLLM server with the connector: HTTP like vLLM's, the connector's real bookkeeping and writer, states made of token ids."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import torch

from firesteel.hidden.exchange import Exchange
from firesteel.inside_vllm.plan import Planner
from firesteel.inside_vllm.writer import Writer

IDS, D, SIZE = [1, 2, 4], 8, 4
TABLE = torch.randn(64, len(IDS), D, generator=torch.Generator().manual_seed(0))


class FakeServer:
    """Serves until left. `faults` are taken one a completion, from the front; see `_complete` for their names."""

    def __init__(self, exchange: Exchange, *, weights: str | None = "digest", num_layers: int = 4, faults: list[str] | None = None) -> None:
        self.planner = Planner(IDS, num_layers, SIZE, 512, weights, "fake/model")
        self.writer = Writer(exchange, IDS, 4, weights, lease=60)
        self.exchange, self.faults, self.requests = exchange, list(faults or []), 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(200, {"data": [{"id": "fake/model"}]})

            def do_POST(self) -> None:
                self._say(*fake._complete(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _say(self, code: int, body: Any) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.writer.close()

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            fault = self.faults.pop(0) if self.faults else ""
            self.requests += 1
            name = f"r{self.requests}"
        if fault == "500":
            return 500, {"error": {"message": "EngineCore died"}}
        if fault == "400":
            return 400, {"error": {"message": "maximum context length"}}
        if fault == "hang":
            time.sleep(1.5)
            return 500, {}
        if fault == "not json":
            return 200, b"<html>"
        if fault == "no connector":
            return 200, {"choices": [{}]}
        ids = body["prompt"]
        states = TABLE[torch.tensor(ids)].clone()
        if fault == "overflow":
            states[1, 1] = float("inf")
        if fault == "zeros":
            states.zero_()
        if fault == "short":
            ids, states = ids[:-2], states[:-2]
            body["kv_transfer_params"]["firesteel"]["last"] = []
        if fault == "other":
            ids = [*ids[:-1], (ids[-1] + 1) % 64]
        blocks = list(range(-(-len(ids) // SIZE)))
        cache = torch.zeros(len(blocks), len(IDS), SIZE, D)
        for t in range(len(ids)):
            cache[t // SIZE, :, t % SIZE] = states[t]
        self.planner.start(name, ids, body.get("kv_transfer_params"))
        saves = self.planner.step({name: 0}, {name: 1 if fault == "aborted" else len(ids)}, lambda _: blocks)
        answer = self.planner.finish(name)
        if fault != "silent":
            for save in saves:
                self.writer.submit(save, cache)
        if fault == "damaged":
            _damage(self.exchange, saves[0].wanted.handle)
        return 200, {"choices": [{}], "kv_transfer_params": answer}


def _damage(exchange: Any, handle: str) -> None:
    while exchange.look(handle) is None:
        time.sleep(0.005)
    path = exchange.folder / f"{handle}.states"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
