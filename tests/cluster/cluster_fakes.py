"""Programs in the place of vLLM's Python, Firesteel's Python and `ssh`, and a recipe for a cluster of them on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers
from ports import free_port

from firesteel.recipe import Recipe, recipe_from_dict

# Answers a probe of versions, serves /health, and says what it was started with. FAKE_* in its environment make it misbehave.
SERVER = """#!{python}
import http.server, json, os, sys, time
if sys.argv[1] == "-c":
    print(os.environ.get("FAKE_VERSIONS", json.dumps({{"python": "3.11", "vllm": "0.32.0"}})))
    raise SystemExit
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
print("server", flags["--port"], os.environ.get("PYTHONPATH", ""), flush=True)
if os.environ.get("FAKE_DIES") == flags["--host"]:
    print("ValueError: no room on the device", flush=True)
    raise SystemExit(3)
if "FAKE_DIES_LATER" in os.environ:
    import threading
    threading.Timer(float(os.environ["FAKE_DIES_LATER"]), lambda: os._exit(9)).start()
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.send_response(503 if "FAKE_HANGS" in os.environ else 200)
        self.end_headers()
http.server.ThreadingHTTPServer((os.environ.get("FAKE_HOST", flags["--host"]), int(flags["--port"])), Handler).serve_forever()
"""
# A trainer: notes its arguments, works a while, notes an interrupt as a run that saves its state.
TRAINER = """#!{python}
import json, os, sys, time
if sys.argv[1] == "-c":
    print(json.dumps({{"python": "3.11", "firesteel": "1.0"}}))
    raise SystemExit
if sys.argv[1:3] == ["-m", "firesteel.cluster.remote"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
print("trainer", json.dumps(sys.argv[1:]), flush=True)
try:
    time.sleep(float(os.environ.get("FAKE_WORK", "0.2")))
except KeyboardInterrupt:
    print("state saved", flush=True)
    raise SystemExit(130)
raise SystemExit(int(os.environ.get("FAKE_CODE", "0")))
"""
# `ssh`: drops its own options, keeps a list of hosts, refuses those that are down, runs the rest here.
SSH = """#!{python}
import os, subprocess, sys
args = sys.argv[1:]
while args[0].startswith("-"):
    args = args[2:] if args[0] in ("-o", "-l", "-p") else args[1:]
host, command = args[0], " ".join(args[1:])
with open({log!r}, "a") as f:
    f.write(" ".join(sys.argv[1:]).replace("\\n", " ") + "\\n")
if host == os.environ.get("FAKE_DOWN"):
    print("ssh: connect to host " + host + " port 22: No route to host", file=sys.stderr)
    raise SystemExit(255)
env = {{**os.environ, **({{"FAKE_VERSIONS": os.environ["FAKE_OTHER"]}} if host == os.environ.get("FAKE_OTHER_HOST") else {{}})}}
os.execvpe("sh", ["sh", "-c", command], env)
"""


def program(path: Path, text: str, **values: str) -> Path:
    path.write_text(text.format(python=sys.executable, **values))
    path.chmod(0o755)
    return path


def tiny_config(folder: Path) -> Path:
    """A target of which there is only a config.json."""
    transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=512, max_position_embeddings=512
    ).save_pretrained(folder / "target")
    (folder / "target" / "model.safetensors").touch()
    return folder / "target"


def settings(folder: Path, *, trainers: int = 1, **sections: dict[str, Any]) -> dict[str, Any]:
    """A group of two servers and a trainer, or two such groups; every node has a loopback address of its own. `sections` are laid over it."""
    port = free_port()
    names = ("a", "b")[:trainers]
    nodes = [{"name": f"{g}{i}", "address": f"127.0.{k}.{i}", "kind": "cpu"} for k, g in enumerate(names) for i in (1, 2, 3)]
    groups = [{"name": g, "inference": [f"{g}1", f"{g}2"], "training": [f"{g}3"], "port": port} for g in names]
    base: dict[str, Any] = {
        "target": {"model": str(folder / "target"), "engine": "vllm", "vllm": {"python": str(folder / "server-python"), "start_timeout": 20}},
        "hidden": {"store": "stream", "max_length": 128},
        "drafter": {"markov_rank": 8},
        "train": {"max_steps": 10, "batch_tokens": 128, "anchors": 16},
        "cluster": {"nodes": nodes, "groups": groups, "python": str(folder / "trainer-python"), "rendezvous_port": free_port()},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return {"name": "toy", "runs_dir": str(folder / "runs"), **base}


def recipe(folder: Path, **more: Any) -> Recipe:
    """The same, validated."""
    return recipe_from_dict(settings(folder, **more))


def install(folder: Path) -> None:
    """A target, and the programs that the recipes above name."""
    tiny_config(folder)
    program(folder / "server-python", SERVER)
    program(folder / "trainer-python", TRAINER)
