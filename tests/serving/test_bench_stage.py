"""`firesteel bench` from servers to files, with servers of known speed; and what a user is told when something is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bench_fake import FakeServer, drive_directly
from typer.testing import CliRunner

from firesteel.artifact import open_artifact
from firesteel.cli.app import app
from firesteel.errors import DataError, FiresteelError, RecipeError, ResourceError, TargetError
from firesteel.evaluation.bench import read_bench
from firesteel.evaluation.bench_schema import Load
from firesteel.recipe import recipe_from_dict
from firesteel.serving.load import Generator, LoadPlan
from firesteel.stages import bench
from firesteel.stages.line import Line


class Screen:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    warn = say

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Any]:
        yield self

    def advance(self, amount: float = 1, note: str = "") -> None: ...


MakeLine = Callable[..., Line]


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLine:
    """A recipe with four prompts of two domains and short measurements; keyword arguments are settings of `bench`."""
    monkeypatch.setattr(bench, "find_generator", lambda settings: Generator(sys.executable, "0.8.1"))
    monkeypatch.setattr("firesteel.evaluation.bench_plots.DPI", 30)
    rows = [{"domain": d, "messages": [{"role": "user", "content": f"{d} {i}"}]} for d in ("math", "code") for i in range(2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def make(**own: Any) -> Line:
        settings = {
            "prompts": str(tmp_path / "prompts.jsonl"),
            "concurrency": [1, 4],
            "min_requests": 2,
            "requests": 2,
            "repeats": 2,
            "max_new_tokens": 13,
            **own,
        }
        recipe = {"name": "tiny", "runs_dir": str(tmp_path / "runs"), "train": {"max_steps": 1}, "bench": settings}
        return Line(recipe_from_dict(recipe), Screen())

    return make


def measure(line: Line, **servers: str) -> Any:
    return read_bench(bench.run(line, servers, drive=drive_directly) / "bench.json")


def test_two_servers_and_all_files(line: MakeLine) -> None:
    """The fast server writes three tokens a step where the plain one writes one."""
    with FakeServer(step=0.02, slope=0.1, drafted=4, accepted=2) as fast, FakeServer(step=0.02, slope=0.1) as plain:
        found = measure(line(), drafter=fast.url, plain=plain.url)
        assert sorted(fast.prompts) == sorted(plain.prompts)  # both get the same texts
        assert len(set(fast.prompts)) == len(fast.prompts) == 2 * ((1 + 2) + (4 + 8))  # warm-up and measurement, two levels, two repeats: no text twice
        assert {p.split("] ", 1)[1] for p in fast.prompts} == {"math 0", "math 1", "code 0", "code 1"}
    assert found.run.baseline == "plain"
    assert found.run.prompts == {"math": 2, "code": 2}
    by = {(m.server, m.repeat, m.concurrency): m for m in found.measurements}
    assert [(s, c) for s, r, c in by if r == 0] == [("drafter", 1), ("plain", 1), ("drafter", 4), ("plain", 4)]
    assert [(s, c) for s, r, c in by if r == 1] == [("plain", 1), ("drafter", 1), ("plain", 4), ("drafter", 4)]  # the other way round
    for (server, _, users), m in by.items():
        steps, slow = (4, 0.02 * (1 + 0.1 * (users - 1))) if server == "drafter" else (12, 0.02 * (1 + 0.1 * (users - 1)))
        assert (m.completed, m.failed, m.output_tokens) == (2 * users, 0, 26 * users)
        assert m.tpot_ms is not None
        assert m.ttft_ms is not None
        assert m.ttft_ms.median >= 19
        # Never faster than the server; how much slower is this machine's affair.
        assert m.tpot_ms.median >= 1000 * 0.02 * steps / 12 * 0.95
        assert m.tpot_ms.median <= 1000 * slow * steps / 12 * 4
        if server == "drafter":
            assert (m.acceptance_length, m.drafted_per_step, m.accepted_per_step) == (3.0, 4.0, 2.0)
            assert m.served.tokens == m.output_tokens
        else:
            assert m.acceptance_length is None
    assert found.servers["drafter"].counters
    assert not found.servers["plain"].counters
    folder = line().folder / "bench"
    assert {p.name for p in folder.iterdir()} == {"bench.json", "bench.html", "frontier.png", "budget.png", "first_token.png", "manifest.json"}
    open_artifact(folder, "bench")


def test_domains_apart(line: MakeLine) -> None:
    with FakeServer() as server:
        made = line(by_domain=True, domains=["code"], repeats=1, concurrency=[2], warmup=0, unique=False, api="completions", body={"top_k": 3})
        found = measure(made, only=server.url)
        assert set(server.prompts) == {"code 0", "code 1"}
        assert {b["top_k"] for b in server.asked} == {3}
    assert [p.domain for p in found.points] == ["code"]
    assert found.run.salt is None
    assert found.gains == []
    assert any("only: up to" in text for text in made.screen.lines)  # type: ignore[attr-defined]


def test_failed_requests_are_reported(line: MakeLine) -> None:
    with FakeServer(most=2) as server:
        made = line(repeats=1, warmup=0)
        found = measure(made, only=server.url)
    four = found.points[1]
    assert four.failed > 0
    assert four.completed > 0
    assert four.failures == {"HTTP 503": four.failed}
    assert not four.on_frontier
    assert any("requests failed: HTTP 503" in text for text in made.screen.lines)  # type: ignore[attr-defined]


def test_no_answer_at_all_is_an_error(line: MakeLine) -> None:
    with FakeServer(most=0) as server, pytest.raises(TargetError, match="no request was answered: HTTP 503"):
        measure(line(repeats=1), only=server.url)


def test_interrupted_measurements_are_kept(line: MakeLine) -> None:
    made, calls = line(), 0

    def stop(generator: Generator, plan: LoadPlan) -> Load:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return drive_directly(generator, plan)

    with FakeServer() as server:
        with pytest.raises(KeyboardInterrupt):
            bench.run(made, {"only": server.url}, drive=stop)
        first = len(server.asked)
        found = measure(line(), only=server.url)
        assert len(set(server.prompts[:first]) & set(server.prompts[first:])) > 0  # the cut measurement asks again what it had asked
    assert "3 of 4 measurements are of an earlier sitting" in found.notes[0]
    assert len(found.measurements) == 4


def test_key_goes_with_every_request(line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed: list[str | None] = []

    def drive(_: Generator, plan: LoadPlan) -> Load:
        keyed.append(plan.api_key)
        return Load(answers=[], failures={"none": 1})

    monkeypatch.setenv("BENCH_KEY", "secret")
    with FakeServer(key="secret") as server:
        made = line(api_key_variable="BENCH_KEY", repeats=1, concurrency=[1])
        with pytest.raises(TargetError):
            bench.run(made, {"only": server.url}, drive=drive)
        assert len(server.asked) == 1  # the warm-up passed
    assert keyed == ["secret"]
    assert not any("secret" in p.read_text(errors="replace") for p in made.folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("own", "error", "says"),
    [
        ({"domains": ["maths"]}, RecipeError, r"bench\.domains has 'maths'(.|\n)*math, code"),
        ({"baseline": "slow"}, RecipeError, r"bench\.baseline=slow is none of the servers"),
        ({"model": "huge"}, RecipeError, r"does not serve 'huge'(.|\n)*bench\.model"),
        ({"api_key_variable": "NO_SUCH_KEY"}, RecipeError, "NO_SUCH_KEY, but that variable is not set"),
        ({"prompts": "nowhere.jsonl"}, DataError, "nowhere"),
    ],
)
def test_bad_settings_are_named_before_anything_is_sent(line: MakeLine, own: dict[str, Any], error: type[FiresteelError], says: str) -> None:
    with FakeServer() as server:
        with pytest.raises(error, match=says):
            measure(line(**own), only=server.url)
        assert server.asked == []


def test_levels_are_checked() -> None:
    for levels in ([], [0], [2, 2]):
        with pytest.raises(RecipeError, match=r"bench\.concurrency: needs levels"):
            recipe_from_dict({"train": {"max_steps": 1}, "bench": {"concurrency": levels}})


def test_servers_by_name() -> None:
    assert bench.named_servers(["a=http://x:1", "b=http://y?q=1"]) == {"a": "http://x:1", "b": "http://y?q=1"}
    assert bench.named_servers(["http://x:1?q=2"]) == {"server": "http://x:1?q=2"}
    for texts in (["a"], ["=http://x"], ["a=x:1"]):
        with pytest.raises(RecipeError, match="is not NAME=URL"):
            bench.named_servers(texts)
    with pytest.raises(RecipeError, match="two servers are named 'a'"):
        bench.named_servers(["a=http://x", "a=http://y"])


def test_verb_without_guidellm(tmp_path: Path) -> None:
    empty = tmp_path / "python"
    empty.write_text("#!/bin/sh\nexit 1\n")
    empty.chmod(0o755)
    done = CliRunner().invoke(app, ["bench", "quickstart", f"bench.python={empty}", f"runs_dir={tmp_path}", "--server", "drafter=http://127.0.0.1:9"])
    assert isinstance(done.exception, ResourceError)
    assert 'pip install "firesteel[bench]"' in str(done.exception)
    assert "--server" in CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output


@pytest.mark.skipif(find_spec("guidellm") is None, reason='guidellm is not installed (pip install "firesteel[bench]")')
def test_whole_verb_with_the_real_guidellm(line: MakeLine, tmp_path: Path) -> None:
    settings = line().recipe.bench
    with FakeServer(drafted=4, accepted=2) as fast, FakeServer() as plain:
        words = [f"bench.prompts={settings.prompts}", "bench.concurrency=[2]", "bench.repeats=1", "bench.max_new_tokens=13", f"runs_dir={tmp_path}"]
        done = CliRunner().invoke(app, ["bench", "quickstart", *words, "--server", f"drafter={fast.url}", "--server", f"plain={plain.url}"])
        assert done.exception is None, done.output
    found = read_bench(tmp_path / "quickstart" / "bench" / "bench.json")
    drafter, plain_point = found.points
    assert (drafter.completed, drafter.failed, plain_point.completed) == (8, 0, 8)
    assert drafter.acceptance_length is not None
    assert drafter.acceptance_length.median == 3.0
    assert plain_point.acceptance_length is None
    assert found.measurements[0].served.tokens == found.measurements[0].output_tokens == 8 * 13
    (gain,) = found.gains
    assert gain.concurrency[0].tokens_per_second_per_user is not None
    assert gain.concurrency[0].tokens_per_second_per_user.median > 1.2  # three times, less what this machine loses
