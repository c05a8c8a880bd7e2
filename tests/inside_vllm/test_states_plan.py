"""The connector's bookkeeping, without vLLM: when a prefill ends, what is refused, what is answered; and what is imported in there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from firesteel.errors import FiresteelError
from firesteel.hidden.wire import FIELD, Wanted
from firesteel.inside_vllm.plan import Planner, find_group

ROOT = Path(__file__).parents[2]


def planner() -> Planner:
    return Planner([1, 2, 4], 4, 4, 64, "digest", "some/model")


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


def take(p: Planner, name: str, steps: list[tuple[int, int, bool]], blocks: list[int], length: int = 20) -> str | None:
    """A request for `length` tokens in these steps, each (computed, scheduled, another client's text reaches the longest length); the error of its save."""
    p.start(name, list(range(length)), params())
    saves = []
    for computed, count, long in steps:
        others = {"long": 63 if long else 20}
        saves += p.step({name: computed, **others}, {name: count, "long": 1}, lambda r: blocks if r == name else [*range(90, 106)])
    (save,) = saves
    assert p.finish(name) is not None
    assert save.blocks == ([] if save.error else blocks)
    return save.error


def test_a_step_in_which_vllm_writes_no_states_spoils_its_requests() -> None:
    p = planner()
    # Another client's text reaches the longest length while ours is half read.
    error = take(p, "r", [(0, 10, True), (10, 10, False)], [1, 2, 3, 4, 5])
    assert error is not None
    assert "captured no states" in error
    assert "longest length of 64" in error
    # Preempted, and begun anew in the same blocks.
    assert take(p, "again", [(0, 10, True), (0, 10, False), (10, 10, False)], [1, 2, 3, 4, 5]) is None
    assert take(p, "decoding", [(0, 20, False)], [1, 2, 3, 4, 5]) is None


def test_blocks_of_such_a_step_spoil_whoever_finds_them_in_the_prefix_cache_until_they_are_written_anew() -> None:
    p = planner()
    assert take(p, "first", [(0, 10, True), (10, 10, False)], [1, 2, 3, 4, 5]) is not None
    # A retry, and another prompt that begins alike, are given blocks 1 and 2 as computed.
    retry = take(p, "retry", [(8, 12, False)], [1, 2, 6, 7, 8])
    assert retry is not None
    assert "--no-enable-prefix-caching" in retry
    assert take(p, "alike", [(4, 6, False)], [1, 9, 10], length=10) is not None
    # Block 3 was half written in that step: its second half, written by the next one, does not mend the first.
    assert take(p, "longer", [(12, 8, False)], [11, 12, 3, 13, 14]) is not None
    assert take(p, "other", [(0, 20, False)], [6, 7, 8, 9, 10]) is None, "good blocks stay good"
    # Block 2 is given to somebody who writes it from its beginning, then 1 and 3.
    assert take(p, "new", [(0, 8, False)], [15, 2], length=8) is None
    assert take(p, "retry", [(8, 12, False)], [1, 2, 6, 7, 8]) is not None, "block 1 is as it was"
    assert take(p, "newer", [(0, 8, False)], [1, 3], length=8) is None
    assert take(p, "retry", [(8, 12, False)], [1, 2, 3, 7, 8]) is None


def test_blocks_of_other_clients_count_too() -> None:
    """Whoever's text it was: what a step that wrote no states computed may be the prefix of a prompt whose states are wanted."""
    p = planner()
    p.step({"plain": 0, "long": 60}, {"plain": 8, "long": 4}, lambda r: [1, 2] if r == "plain" else [*range(90, 106)])
    assert take(p, "r", [(8, 12, False)], [1, 2, 3, 4, 5]) is not None
    assert take(p, "q", [(4, 16, False)], [105, 6, 7, 8, 9]) is not None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_group_that_keeps_states_is_found_among_several(place: int) -> None:
    """A hybrid target: groups of attention and of Mamba layers, with block sizes of their own."""
    groups = [
        SimpleNamespace(layer_names=["model.layers.3.self_attn", "model.layers.7.self_attn"], kv_cache_spec=SimpleNamespace(block_size=528)),
        SimpleNamespace(layer_names=["model.layers.0.linear_attn"], kv_cache_spec=SimpleNamespace(block_size=2096)),
    ]
    groups.insert(place, SimpleNamespace(layer_names=["draft.cache_only_layers.4"], kv_cache_spec=SimpleNamespace(block_size=16)))
    assert find_group(SimpleNamespace(kv_cache_groups=groups)) == (place, 16)
    del groups[place]
    with pytest.raises(FiresteelError, match=r"none of vLLM's cache groups keeps hidden states: .*layers\.0\.linear_attn"):
        find_group(SimpleNamespace(kv_cache_groups=groups))


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
