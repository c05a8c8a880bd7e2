"""`firesteel serve --engine own` on a tiny run: the check against what was measured, a real process from start to SIGTERM, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from line_screen import QuietScreen
from ports import free_port
from tiny_target import recipe_settings, save_tiny_target

from firesteel.cli.runner import run_line
from firesteel.decoding.decode import decode_plain
from firesteel.errors import ArtifactError, CheckpointError, RecipeError, TargetError, VerificationError
from firesteel.prompts.template import encode_prompt
from firesteel.recipe import recipe_from_dict
from firesteel.serving.counters import Counters
from firesteel.serving.smoke import Expectation, Pace, Smoke
from firesteel.stages import serve_own
from firesteel.stages.line import Line
from firesteel.target.session import TargetSession

MakeLine = Callable[..., Line]


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> Path:
    """A run with an evaluated package."""
    settings = recipe_settings(base_folder, train={"max_steps": 120, "validate_every": 60, "lr": 5e-3}, evaluate={"speed_prompts": 0})
    line = Line(recipe_from_dict({**settings, "runs_dir": str(tmp_path_factory.mktemp("served_own"))}), QuietScreen())
    run_line(line)
    return line.folder


@pytest.fixture
def line(packaged: Path, base_folder: Path) -> Callable[..., Line]:
    def make(**own: object) -> Line:
        settings = recipe_settings(base_folder, serve={"engine": "own", "cache_gb": 0.01, "port": free_port(), **own})
        return Line(recipe_from_dict({**settings, "runs_dir": str(packaged.parent)}), QuietScreen())

    return make


def test_a_server_that_accepts_what_was_measured_passes_the_check(line: Callable[..., Line], packaged: Path) -> None:
    served = line()
    serve_own.run(served, None, dry_run=False, smoke=True)
    assert (packaged / "serve" / "smoke_own.json").is_file()
    said, timed = served.screen.lines[-2:]  # type: ignore[attr-defined]
    assert "by Firesteel's own engine" in said
    counted = json.loads((packaged / "serve" / "smoke_own.json").read_text())
    speed = counted["speed"]
    assert speed["ratio"] == pytest.approx(speed["drafted"] / speed["plain"])
    assert f"{speed['ratio']:.2f} times" in timed
    assert f"{speed['drafted']:.1f} tokens/s with 4 drafts a round, {speed['plain']:.1f} without" in timed
    assert timed.startswith("warning: ") == (speed["ratio"] < 1)
    lengths = [float(said.split(word)[1].split()[0]) for word in ("acceptance length ", "; ")]
    # A server counts drafts behind the end of an answer, a report does not.
    assert lengths[1] <= lengths[0] + 1e-9
    # Nor does it count a round with room for one token only; a report does.
    accepted, rounds = counted["counters"]["accepted"], counted["counters"]["drafts"]
    rounds = max(rounds, counted["tokens"] - counted["prompts"] - accepted)
    assert 1 + accepted / rounds == pytest.approx(lengths[1], rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "within"),
    [(40, 1 + 25 / 11), (38, 1 + 25 / 9), (36, 1 + 23 / 9), (5, 1.0)],
    ids=["two rounds had no room for drafts", "all within", "two accepted behind an end", "hardly any"],
)
def test_what_lies_within_the_answers_is_worked_out_of_the_counters(tokens: int, within: float) -> None:
    smoke = Smoke(4, tokens, Counters(9, 31, 25, (8, 7, 6, 4)), Expectation(3.0, 4, "these prompts", exact=True))
    assert smoke.acceptance_within == pytest.approx(within)


def test_a_server_that_accepts_less_fails_the_check(line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch) -> None:
    served = line()
    real = serve_own.held_out

    def better(line: Line, folder: Path, tokens: int, *, needed: bool) -> object:
        found = real(line, folder, tokens, needed=needed)
        object.__setattr__(found.expected, "acceptance_length", 4.9)
        return found

    monkeypatch.setattr(serve_own, "held_out", better)
    with pytest.raises(VerificationError, match=r"but 4\.900 was measured"):
        serve_own.run(served, None, dry_run=False, smoke=True)


def test_a_server_that_accepts_more_on_the_same_prompts_fails_the_check(line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch) -> None:
    real = serve_own.held_out

    def worse(line: Line, folder: Path, tokens: int, *, needed: bool) -> object:
        found = real(line, folder, tokens, needed=needed)
        assert found.expected.exact
        object.__setattr__(found.expected, "acceptance_length", 1.0)
        return found

    monkeypatch.setattr(serve_own, "held_out", worse)
    with pytest.raises(VerificationError, match=r"but only 1\.000 was measured on the same"):
        serve_own.run(line(), None, dry_run=False, smoke=True)


def test_a_drafter_that_slows_down_is_warned_of(line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch) -> None:
    served = line()
    monkeypatch.setattr(serve_own, "time_both", lambda *args, **more: Pace(drafted=30.0, plain=40.0))
    serve_own.run(served, None, dry_run=False, smoke=True)
    assert served.screen.lines[-1].startswith("warning: serve: the drafter makes it slower, 0.75 times: 30.0 tokens/s")  # type: ignore[attr-defined]


def test_a_bare_folder_of_which_nothing_was_measured_is_refused(line: Callable[..., Line], packaged: Path, tmp_path: Path) -> None:
    shutil.copytree(packaged / "package", tmp_path / "package")
    with pytest.raises(VerificationError, match="nothing was measured for 2 drafts a round"):
        serve_own.run(line(tokens=2), tmp_path / "package", dry_run=False, smoke=True)


def test_a_process_serves_and_ends_with_code_0_after_what_runs(line: Callable[..., Line], packaged: Path) -> None:
    served = line()
    port = served.recipe.serve.port
    command = [sys.executable, "-m", "firesteel.cli.app", "serve", str(packaged / "package"), "--engine", "own", "--api-key", "007"]
    settings = [f"serve.port={port}", "serve.cache_gb=0.01", "serve.model_name=tiny", f"runs_dir={packaged.parent}", "target.threads=1"]
    cache = f"target.cache_dir={packaged.parent / 'cache'}"
    process = subprocess.Popen([*command, *settings, cache], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"})
    try:
        while True:
            assert process.poll() is None, process.communicate()[0]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="007", max_retries=0, timeout=120, http_client=httpx.Client(trust_env=False))
        assert [m.id for m in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": "w3 w14 w15"}]
        found = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=20)  # type: ignore[call-overload]
        target = served.target
        prompt = encode_prompt(target.tokenizer, messages)
        alone = decode_plain(TargetSession(target.model, (1, 2, 4), max_length=128), prompt, max_new_tokens=20, eos_ids=target.spec.eos_ids)
        assert found.choices[0].message.content == target.tokenizer.decode(alone.tokens, skip_special_tokens=True)
        assert found.choices[0].finish_reason == alone.finish_reason
        assert found.usage.completion_tokens == len(alone.tokens)
        stream = client.completions.create(model="tiny", prompt="w1 w2", max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert [c.choices[0].finish_reason for c in stream][-1] == "length", "what runs is finished"
        said = process.communicate()[0]
        assert process.returncode == 0, said
        assert "drafts a round at most (scheduled)" in said
        assert "serve: stopped" in said
    finally:
        process.kill()
        process.wait()


def test_plain_decoding_needs_no_package(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = []
    monkeypatch.setattr(serve_own.Server, "run", lambda self, service: (self.close(), engines.append(service.engine)))
    plain = make_line(serve={"engine": "own", "policy": "plain", "cache_gb": 0.01, "port": free_port()})
    serve_own.run(plain, None, dry_run=False, smoke=False)
    assert engines[0].drafter is None
    assert "no drafter" in "\n".join(plain.screen.lines)  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match="serves none"):
        serve_own.run(plain, None, dry_run=False, smoke=True)


def test_a_drafter_for_another_target_is_refused_at_start(packaged: Path, base_folder: Path, tmp_path: Path) -> None:
    other = save_tiny_target(tmp_path / "other", seed=5)
    settings = recipe_settings(base_folder, target={"model": str(other)}, serve={"engine": "own", "cache_gb": 0.01, "port": free_port()})
    line = Line(recipe_from_dict(settings), QuietScreen())
    with pytest.raises(CheckpointError, match="was trained for"):
        serve_own.run(line, packaged / "package", dry_run=False, smoke=False)
    with socket.socket() as s:
        s.bind(("127.0.0.1", line.recipe.serve.port))  # the port was given back


@pytest.mark.parametrize(
    ("own", "dry_run", "words"),
    [({}, True, "prints vLLM's commands"), ({"nodes": 2, "tensor_parallel": 2}, False, r"serve\.nodes is vLLM's"), ({"args": ["-x"]}, False, r"serve\.args")],
)
def test_settings_of_vllm_are_refused(make_line: MakeLine, own: dict[str, object], dry_run: bool, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        serve_own.run(make_line(serve=own), None, dry_run=dry_run, smoke=False)


def test_nothing_packaged_and_a_damaged_package_are_refused(make_line: MakeLine, packaged: Path, tmp_path: Path) -> None:
    empty = make_line(serve={"port": free_port()})
    with pytest.raises(ArtifactError, match="there is no packaged drafter"):
        serve_own.run(empty, None, dry_run=False, smoke=False)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in (packaged / "package").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[:-40] if file.suffix == ".safetensors" else file.read_bytes())
    with pytest.raises(CheckpointError, match="corrupt"):
        serve_own.run(empty, damaged, dry_run=False, smoke=False)


def test_without_fastapi_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "import firesteel.cli.app as a\n"
        "sys.argv = ['firesteel', 'serve', 'quickstart', '--engine', 'own']\n"
        "a.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'pip install "firesteel[server]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_clients_give_options_of_the_template(make_line: MakeLine, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }} {% endfor %}{% if enable_thinking %}w7{% endif %}")
    served = serve_own.served_model(make_line(target={"chat_template": str(file), "template_options": {"enable_thinking": True}}))
    asked = [{"role": "user", "content": "w1"}]
    said = [served.encode_chat(asked, None, options) for options in ({}, {"enable_thinking": True}, {"enable_thinking": False})]
    assert said[0] == said[1] == [*said[2], 14]
    with pytest.raises(TargetError, match=r"chat_template_kwargs has 'enable_thinkin', .*\n  -> did you mean enable_thinking"):
        served.encode_chat(asked, None, {"enable_thinkin": False})
    with pytest.raises(TargetError, match="chat_template_kwargs has 'tokenize', which is no option"):
        served.encode_chat(asked, None, {"tokenize": True})
