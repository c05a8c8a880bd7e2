"""What docs/server.md tells people to type works, and what it lists is there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from server_toys import SERVED, Running, running

from firesteel.recipe import Serve
from firesteel.serving.api_types import ChatRequest, CompletionRequest

DOC = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
HERE = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A toy that takes any text for words it has."""

    def encode(text: str) -> list[int]:
        return [3 + len(word) for word in text.split()]

    served = replace(SERVED, encode=encode, encode_chat=lambda messages, tools, options: encode(messages[0]["content"]))
    with running(served=served) as found:
        yield found


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOC, re.S)


def test_the_python_example_runs(server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (code,) = blocks("python")
    exec(compile(code.replace(HERE, server.url), "docs/server.md", "exec"), {})
    assert len(capsys.readouterr().out) > 10


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_curl_examples_run(server: Running) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 7
    for command in commands:
        done = subprocess.run([*shlex.split(command.replace(HERE, server.url)), "--noproxy", "*", "--fail"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert done.stdout


def test_listed_metrics_are_told(server: Running) -> None:
    listed = set(re.findall(r"(?:vllm|firesteel):\w+", DOC.split("## Metrics")[1]))
    with server.client() as client:
        told = set(re.findall(r"^# TYPE (\S+)", client.get("/metrics").text, re.M))
    assert listed == told


def test_listed_limits_have_these_defaults() -> None:
    rows = re.findall(r"^\| ((?:`serve\.\w+`(?:, )?)+) \| ([^|]+) \|", DOC, re.M)
    assert len(rows) == 6
    for names, defaults in rows:
        for name, default in zip(re.findall(r"serve\.(\w+)", names), defaults.split(", "), strict=True):
            value = Serve.model_fields[name].default
            assert str(value) == default.strip() or (value is None and default == "the target's")


def test_listed_fields_are_known() -> None:
    table = DOC.split("| field | notes |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named <= CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys()
    assert {"model", "stop", "speculate", "firesteel", "tools"} <= named
