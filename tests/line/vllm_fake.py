"""A program in the place of vLLM's Python: says which vLLM it is, and serves as the environment variable FAKE_VLLM tells it.

FAKE_VLLM is JSON: `accepted`, `drafts` and `tokens` per request; `die` (last words), `hang`, `metrics: false` (no counters), `status` (of completions).
FAKE_VLLM_IS is its distribution and version, FAKE_CUDA whether its PyTorch sees a CUDA device.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PROGRAM = """#!{python}
import http.server, json, os, sys, time
if sys.argv[1] == "-c":
    print(os.environ.get("FAKE_CUDA", "False") if "torch" in sys.argv[2] else os.environ.get("FAKE_VLLM_IS", "vllm 0.32.0"))
    raise SystemExit
how = json.loads(os.environ["FAKE_VLLM"])
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
print("loading", flags["--model"], flush=True)
if "die" in how:
    raise ValueError(how["die"])
if how.get("hang"):
    time.sleep(60)
width = json.loads(flags["--speculative-config"])["num_speculative_tokens"]
counts = dict(drafts=7.0, draft_tokens=7.0 * width, accepted_tokens=1.0)  # of others, before the check

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def answer(self, body, status=200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        if self.path == "/v1/models":
            self.answer({{"data": [{{"id": flags["--model"]}}]}})
        elif self.path == "/metrics":
            rows = [f'vllm:spec_decode_num_{{k}}_total{{{{engine="0",model_name="m"}}}} {{v}}' for k, v in counts.items()] if how.get("metrics", True) else []
            self.answer("\\n".join(["# HELP x y", "vllm:num_requests_running 0.0", *rows, ""]).encode())
        else:
            self.answer(b"")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["temperature"] == 0 and all(isinstance(t, int) for t in asked["prompt"])
        counts["drafts"] += how.get("drafts", 10)
        counts["draft_tokens"] += how.get("drafts", 10) * width
        counts["accepted_tokens"] += how.get("accepted", 0)
        tokens = how.get("tokens", 1 + how.get("drafts", 10) + how.get("accepted", 0))
        self.answer({{"usage": {{"completion_tokens": tokens}}}}, how.get("status", 200))

http.server.ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def install_fake(folder: Path) -> Path:
    """Write the program; give it as `serve.python`."""
    path = folder / "fake-python"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return path


def behave(**how: object) -> None:
    """Set what the next server does."""
    os.environ["FAKE_VLLM"] = json.dumps(how)
