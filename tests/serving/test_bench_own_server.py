"""`firesteel bench` against Firesteel's own server, with guidellm: the server is asked, counts and is measured as any other."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from server_toys import NAME, Brake, decode, running
from typer.testing import CliRunner

from firesteel.cli.app import app
from firesteel.evaluation.bench import read_bench

pytestmark = pytest.mark.skipif(find_spec("guidellm") is None, reason='guidellm is not installed (pip install "firesteel[bench]")')


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_drafter_is_faster_where_steps_are_slow(tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firesteel.evaluation.bench_plots.DPI", 30)
    rows = [{"domain": "words", "prompt": decode([i, i + 1, i + 2]).strip()} for i in range(3, 9)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with running(brake=Brake(0.02)) as drafter, running(brake=Brake(0.02), draft=False) as plain:
        # The toys know forty words: a lead in front of a prompt is none of them.
        words = [f"bench.prompts={tmp_path / 'prompts.jsonl'}", "bench.unique=false", f"bench.api={api}", "bench.concurrency=[2]", "bench.repeats=1"]
        words += ["bench.max_new_tokens=24", "bench.body={ignore_eos: true}", f"runs_dir={tmp_path}"]
        done = CliRunner().invoke(app, ["bench", "quickstart", *words, "--server", f"drafter={drafter.url}", "--server", f"plain={plain.url}"])
        assert done.exception is None, done.output
    found = read_bench(tmp_path / "quickstart" / "bench" / "bench.json")
    assert {name: (s.model, s.software, s.counters) for name, s in found.servers.items()} == {
        "drafter": (NAME, "firesteel", True),
        "plain": (NAME, "firesteel", False),
    }
    fast, slow = found.measurements
    assert (fast.failures, slow.failures) == ({}, {})
    assert fast.output_tokens == slow.output_tokens == 8 * 24
    assert fast.served.tokens == slow.served.tokens == 8 * 24
    assert fast.served.drafting is not None
    assert slow.served.drafting is None
    # Each answer: its first token from the prompt, then 1 + accepted a round. A last step may have had no room for drafts, and drafts
    # behind the end may have been counted.
    rounds, accepted = fast.served.drafting.rounds, fast.served.drafting.accepted
    assert 8 * 22 <= rounds + accepted <= 8 * (23 + 3)
    assert fast.acceptance_length is not None
    assert 1.5 < fast.acceptance_length < 4
    assert found.gains[0].concurrency[0].tokens_per_second_per_user is not None
    assert found.gains[0].concurrency[0].tokens_per_second_per_user.median > 1.2
