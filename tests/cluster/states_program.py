"""A program in vLLM's place that gives real states: it runs the target by Transformers, with the connector's own bookkeeping and writer. With
STATES_PAUSE in its environment it takes so many seconds more for a document. Tests that share memory with it take `make_server` alone."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import transformers

from firesteel.hidden.exchange import Exchange, open_exchange
from firesteel.hidden.weights import weights_digest
from firesteel.inside_vllm.plan import Planner
from firesteel.inside_vllm.writer import Writer
from firesteel.target.local import capture, stack_layers

SIZE = 16  # tokens of a block, as in vLLM's cache


def make_server(folder: str, ids: list[int], longest: int, exchange: Exchange, lease: float, address: tuple[str, int]) -> tuple[ThreadingHTTPServer, Writer]:
    """A server of the target in a folder, not yet serving, and what it hands states over with."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers, weights = model.config.num_hidden_layers, weights_digest(folder)
    planner = Planner(ids, layers, SIZE, longest, weights, folder)
    writer = Writer(exchange, ids, layers, weights, lease=lease)
    pause = float(os.environ.get("STATES_PAUSE", "0"))
    lock, count = threading.Lock(), iter(range(10**9))

    def complete(body: dict[str, Any]) -> Any:
        prompt = body["prompt"]
        with lock, torch.inference_mode(), capture(model, ids) as states:
            time.sleep(pause)
            name = f"r{next(count)}"
            model(torch.tensor([prompt]), use_cache=False)
            found = stack_layers(states, ids)[0]
            blocks = list(range(-(-len(prompt) // SIZE)))
            cache = torch.zeros(len(blocks), len(ids), SIZE, found.shape[-1])
            for t in range(len(prompt)):
                cache[t // SIZE, :, t % SIZE] = found[t]
            planner.start(name, prompt, body.get("kv_transfer_params"))
            for save in planner.step({name: 0}, {name: len(prompt)}, lambda _: blocks):
                writer.submit(save, cache)
            return planner.finish(name)

    def likeliest(prompt: list[int], top: int) -> list[Any]:
        """As vLLM writes them: nothing for the first token, then the distribution that each token was drawn from."""
        with lock, torch.inference_mode():
            found = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(-1).topk(top)
        rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return [None, *({str(i): {"logprob": v} for i, v in zip(*row, strict=True)} for row in rows)]

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._say({"data": [{"id": folder}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            choice = {"prompt_logprobs": likeliest(body["prompt"], body["prompt_logprobs"])} if "prompt_logprobs" in body else {}
            self._say({"choices": [choice], "kv_transfer_params": complete(body) if "kv_transfer_params" in body else None})

        def _say(self, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return ThreadingHTTPServer(address, Handler), writer


def main(argv: list[str]) -> None:
    flags = dict(itertools.pairwise(argv))
    extra = json.loads(flags["--kv-transfer-config"])["kv_connector_extra_config"]
    ids = json.loads(flags["--speculative-config"])["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    address = flags["--host"], int(flags["--port"])
    server, _ = make_server(flags["--model"], ids, int(flags["--max-model-len"]), open_exchange(extra), extra["lease"], address)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
