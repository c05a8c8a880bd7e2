"""Beginnings that were read before, and caches that cannot be cut: the batched engine writes what each request would write alone all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_target import save_hybrid_target
from untrained_package import untrained

from firesteel.decoding.adaptive import Scheduler
from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask, Piece
from firesteel.decoding.batched.sessions import SessionDrafter, SessionTarget
from firesteel.decoding.decode import decode_plain
from firesteel.decoding.policies import Drafted, FixedLength, Hearing, LengthPolicy, Request
from firesteel.decoding.profile import Curve, Profile
from firesteel.drafters.paged import PagedBlockDrafter
from firesteel.stages import serve_own
from firesteel.stages.engine import open_engine
from firesteel.stages.line import Line
from firesteel.target.session import RECURRENT

MakeLine = Callable[..., Line]
HEAD = tuple((5 * j) % 90 + 4 for j in range(40))
PROMPTS = [(*HEAD, 5), (*HEAD[:20], 9, 9), (*HEAD, 6, 7, 8), HEAD, (*HEAD, 5, 6), (7, 8, 9), (*HEAD, 5), (*HEAD[:36], 11)]


class Moody:
    """Drafts for some steps and rests for others, and wants prompts observed at once, later, or not at all, in turn."""

    def __init__(self, phase: int) -> None:
        self.step = phase

    @property
    def hearing(self) -> Hearing:
        moods: tuple[Hearing, ...] = ("at once", "when drafted for", "not", "when drafted for")
        return moods[self.step // 3 % 4]

    def charge(self, seconds: float, reading: float) -> None:
        self.step += 1

    def plan(self, requests: Sequence[Request]) -> list[int]:
        self.step += 1
        return [min(r.room, 3) if (self.step + i) % 5 < 2 else 0 for i, r in enumerate(requests)]

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        return [d.count for d in drafts]

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int], seconds: float | None) -> None:
        for r, d in zip(requests, drafts, strict=True):
            r.silent = 0 if d.count else r.silent + 1


def scheduler() -> Scheduler:
    """By costs at which drafting pays for few requests and not for many."""
    return Scheduler(Profile(Curve((1, 3, 12), (0.01, 0.0105, 0.2)), Curve((1, 4), (0.0005, 0.001))), prior=[0.5])


POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "scheduled": scheduler,
    "fixed": lambda: FixedLength(3),
    **{f"moody {phase}": lambda phase=phase: Moody(phase) for phase in (0, 3, 6, 10)},  # type: ignore[misc]
}


def answers(engine: Engine, speculate: Callable[[int], bool]) -> list[list[int]]:
    """Greedy answers to all prompts, some of which come while others run."""
    heard: list[list[Piece]] = [[] for _ in PROMPTS]
    for i, (prompt, pieces) in enumerate(zip(PROMPTS, heard, strict=True)):
        engine.submit(Ask(prompt, 20, speculate=speculate(i)), pieces.append)
        for _ in range(i % 4):
            engine.step()
    while engine.step():
        pass
    assert engine.pool.used == 0
    return [[t for p in pieces for t in p.tokens] for pieces in heard]


def alone(line: Line) -> list[list[int]]:
    session = line.decoding_session(line.layer_ids, 128)
    return [decode_plain(session, prompt, max_new_tokens=20, eos_ids=()).tokens for prompt in PROMPTS]


@pytest.mark.parametrize("speculate", [lambda i: True, lambda i: i % 2 == 0, lambda i: i > 3], ids=["all", "every other", "the last"])
@pytest.mark.parametrize("policy", POLICIES)
def test_texts_are_the_same_with_reuse_and_without(
    make_line: MakeLine, tmp_path: Path, policy: str, speculate: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = make_line(serve={"policy": "fixed", "cache_gb": 0.01, "max_requests": 4})
    package = untrained(line, tmp_path / "package")
    with_reuse, without = open_engine(line, package), open_engine(line, package)
    assert isinstance(with_reuse.drafter, PagedBlockDrafter)
    without.pool.share = False
    with_reuse.policy, without.policy = POLICIES[policy](), POLICIES[policy]()
    seen: dict[int, int] = {}
    observe = with_reuse.drafter.observe

    def watched(tokens: torch.Tensor, spans: Sequence[Any], aux: torch.Tensor) -> None:
        for span in spans:
            run = next(r for r in with_reuse._running if r.key == span.key)
            assert span.start == run.seen == seen.get(span.key, run.seen), "no hole"
            assert not run.deaf
            seen[span.key] = span.end
        observe(tokens, spans, aux)

    monkeypatch.setattr(with_reuse.drafter, "observe", watched)
    wanted = alone(line)
    for _ in range(2):
        assert answers(with_reuse, speculate) == wanted
    assert with_reuse.pool.hit > 100
    assert answers(without, speculate) == wanted
    assert without.pool.hit == 0


def test_behind_a_drafter_of_sessions_requests_without_it_share(make_line: MakeLine, tmp_path: Path) -> None:
    line = make_line(drafter={"algorithm": "eagle3", "block_size": 3, "num_layers": 1}, serve={"policy": "fixed", "cache_gb": 0.01})
    engine = open_engine(line, untrained(line, tmp_path / "package"))
    assert isinstance(engine.drafter, SessionDrafter)
    wanted = alone(line)
    for _ in range(2):
        assert answers(engine, lambda i: True) == wanted
    assert engine.pool.hit == 0
    assert answers(engine, lambda i: i % 2 == 0) == wanted
    assert engine.pool.hit > 30
    assert "prompts are read whole but for requests without the drafter" in serve_own._describe(line, engine)


def test_the_server_says_what_becomes_of_beginnings(make_line: MakeLine, tmp_path: Path) -> None:
    line = make_line(serve={"policy": "fixed", "cache_gb": 0.01})
    engine = open_engine(line, untrained(line, tmp_path / "package"))
    assert "beginnings that were read before are not read again" in serve_own._describe(line, engine)


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> Path:
    return save_hybrid_target(tmp_path_factory.mktemp("hybrid"), head=False)


@pytest.mark.parametrize("policy", ["fixed", "moody 3"])
def test_recurrent_states_are_put_back_also_for_requests_that_come_again(make_line: MakeLine, tmp_path: Path, hybrid_folder: Path, policy: str) -> None:
    line = make_line(target={"model": str(hybrid_folder), "layer_ids": [1, 2]}, serve={"policy": "fixed", "cache_gb": 0.01, "max_requests": 4})
    engine = open_engine(line, untrained(line, tmp_path / "package"))
    assert isinstance(engine.target, SessionTarget)
    assert line.decoding_session(line.layer_ids, 64).engine_name == RECURRENT
    assert any("recurrent states are copied before every step" in text for text in line.screen.lines)  # type: ignore[attr-defined]
    assert "every prompt is read whole (this target runs sequence by sequence)" in serve_own._describe(line, engine)
    engine.policy, engine.pool = POLICIES[policy](), BlockPool(10, 16, share=False)
    assert answers(engine, lambda i: i != 2) == alone(line)
    assert engine.counters.preemptions > 0
    assert engine.counters.rounds > 0
