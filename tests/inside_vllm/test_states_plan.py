"""The connector's bookkeeping, without vLLM: when a prefill ends, what is refused, what is answered; and what is imported in there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from firesteel.hidden.wire import FIELD, Wanted
from firesteel.inside_vllm.plan import Planner

ROOT = Path(__file__).parents[2]


def planner() -> Planner:
    return Planner([1, 2, 4], 4, 64, "digest", "some/model")


def params(**changes: object) -> dict[str, object]:
    wanted = {"handle": "h-1", "layer_ids": (1, 2), "last": ((3, 6),), "codec": "fp32", **changes}
    return Wanted(**wanted).to_params()  # type: ignore[arg-type]


def no_blocks(request: str) -> list[int]:
    raise AssertionError("no blocks are needed")


def test_states_are_saved_in_the_step_in_which_the_last_chunk_is_computed() -> None:
    p, prompt = planner(), list(range(10))
    p.start("r", prompt, params())
    p.start("other", prompt, None)
    assert p.step({"r": 0, "other": 0}, {"r": 4, "other": 10}, no_blocks) == []
    assert p.step({"r": 4}, {"r": 4}, no_blocks) == []
    (save,) = p.step({"r": 8, "other": 10}, {"r": 2, "other": 1}, lambda r: [7, 9])
    assert (save.wanted.handle, list(save.token_ids), save.blocks, save.error) == ("h-1", prompt, [7, 9], None)
    assert p.step({"r": 10}, {"r": 1}, no_blocks) == [], "decoding steps save nothing"
    answer = p.finish("r")
    assert answer is not None
    assert answer[FIELD]["error"] is None
    assert answer[FIELD]["weights"] == "digest"
    assert p.finish("other") is None


def test_a_prefix_from_the_cache_counts_as_computed() -> None:
    p = planner()
    p.start("r", list(range(10)), params())
    assert [s.blocks for s in p.step({"r": 8}, {"r": 2}, lambda r: [3, 4])] == [[3, 4]]


def test_a_request_that_ends_early_is_not_answered_as_if_it_had_states() -> None:
    p = planner()
    p.start("r", list(range(10)), params())
    p.step({"r": 0}, {"r": 4}, no_blocks)
    answer = p.finish("r")
    assert answer is not None
    assert "before its prefill" in answer[FIELD]["error"]
    assert answer[FIELD]["refused"] is False


@pytest.mark.parametrize(
    ("changes", "prompt", "words"),
    [
        ({"layer_ids": (1, 3)}, 10, "layer 3 is wanted, the server of some/model captures [1, 2, 4]"),
        ({"last": ((5, 11),)}, 10, "the prompt has 10 tokens"),
        ({"last": ((5, 7), (6, 8))}, 10, "last states are wanted"),
        ({"handle": "../../etc/passwd"}, 10, "cannot name a sample"),
        ({"codec": "fp4"}, 10, "no codec 'fp4'"),
        ({}, None, "embeddings"),
    ],
)
def test_what_cannot_be_given_is_refused_in_the_answer(changes: dict[str, object], prompt: int | None, words: str) -> None:
    p = planner()
    p.start("r", None if prompt is None else list(range(prompt)), params(**changes))
    assert p.step({}, {"r": 10}, no_blocks) == []
    answer = p.finish("r")
    assert answer is not None
    assert words in answer[FIELD]["error"]
    assert answer[FIELD]["refused"] is True


def test_another_protocol_and_a_malformed_request_are_refused() -> None:
    for said, words in (({"protocol": 99}, "speaks protocol 99"), ({"protocol": 1}, "malformed"), ("nonsense", "malformed")):
        p = planner()
        p.start("r", [1, 2], {FIELD: said})
        answer = p.finish("r")
        assert answer is not None
        assert words in answer[FIELD]["error"]


def test_a_step_in_which_vllm_writes_no_states_spoils_its_requests() -> None:
    p = planner()
    p.start("r", list(range(20)), params())
    # Another client's text reaches the longest length while ours is half read.
    assert p.step({"r": 0, "long": 63}, {"r": 10, "long": 1}, no_blocks) == []
    (save,) = p.step({"r": 10}, {"r": 10}, no_blocks)
    assert save.error is not None
    assert "captured no states" in save.error
    p.start("again", list(range(20)), params())
    p.step({"again": 0, "long": 63}, {"again": 10, "long": 1}, no_blocks)
    p.step({"again": 0}, {"again": 10}, no_blocks)  # preempted, and begun anew
    (save,) = p.step({"again": 10}, {"again": 10}, lambda r: [1])
    assert save.error is None


def test_nothing_of_training_is_imported_inside_vllm() -> None:
    allowed = {"errors", "hidden.codec", "hidden.sample", "hidden.wire", "hidden.exchange", "hidden.mooncake", "hidden.weights", "inside_vllm"}
    for path in (ROOT / "firesteel" / "inside_vllm").glob("*.py"):
        names = [n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        ours = [n.removeprefix("firesteel.") for n in names if n.startswith("firesteel.")]
        assert all(any(n == a or n.startswith(f"{a}.") for a in allowed) for n in ours), (path, ours)
    code = (
        "import sys, firesteel.inside_vllm.plan, firesteel.inside_vllm.writer\n"
        "ours = {m for m in sys.modules if m.startswith('firesteel.')}\n"
        "heavy = {'transformers', 'pydantic', 'datasets', 'httpx', 'mooncake', 'yaml'} & set(sys.modules)\n"
        "print(sorted(ours)); assert not heavy, heavy\n"
        "assert not {m for m in ours if m.split('.')[1] not in ('errors', 'hidden', 'inside_vllm')}, ours\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
