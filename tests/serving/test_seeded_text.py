"""What docs/server.md promises of a seed: when a text repeats whoever else is there, and when it need not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from decoding_toys import Enumerated, ToyDraft, ToyDrafter, ToyTarget, random_table
from server_toys import LONGEST, TARGET, WORDS, Running, running

from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask, Piece
from firesteel.decoding.batched.sessions import SessionDrafter, SessionTarget
from firesteel.decoding.policies import FixedLength, LengthPolicy, Request
from firesteel.decoding.sampling import Sampling

PROMPT = (5, 9, 17)
OTHERS = ((4, 11), (7, 8, 9, 10, 3), (30,))
DRAFTS = 3
SEEDS = range(6)


class DrawingDrafter(ToyDrafter):
    """Draws its tokens with the request's own random numbers, as real drafters do; about half of them stand."""

    def draft(self, anchor: int, count: int, *, temperature: float, generator: torch.Generator | None) -> ToyDraft:
        context, tokens, probs = (*self.seen, anchor), [], []
        for _ in range(count):
            row = self.table(context)
            tokens.append(int(torch.multinomial(row, 1, generator=generator)) if temperature > 0 else int(row.argmax()))
            probs.append(row)
            context = (*context, tokens[-1])
        return ToyDraft(tokens, torch.stack(probs) if temperature > 0 else None, None)


@dataclass(frozen=True)
class ByLoad(FixedLength):
    """Whole drafts for one request alone, single ones for several."""

    def plan(self, requests: Sequence[Request]) -> list[int]:
        return [min(self.tokens if len(requests) == 1 else 1, r.room) for r in requests]


def drawing_engine(policy: LengthPolicy | None = None) -> Engine:
    other = random_table(len(WORDS), 9, memory=2)

    def mixed(context: tuple[int, ...]) -> torch.Tensor:
        return (TARGET(context) + other(context)) / 2

    target = SessionTarget(lambda: ToyTarget(TARGET, max_length=LONGEST))
    drafter = SessionDrafter(lambda: DrawingDrafter(mixed, Enumerated([])), DRAFTS)
    return Engine(target, drafter, BlockPool(512, 4, share=False), draft_tokens=DRAFTS, policy=policy, max_requests=4, max_tokens=64)


def written(engine: Engine, asks: Sequence[Ask]) -> list[list[int]]:
    heard: list[list[Piece]] = [[] for _ in asks]
    for ask, pieces in zip(asks, heard, strict=True):
        engine.submit(ask, pieces.append)
    while engine.step():
        pass
    return [[t for p in pieces for t in p.tokens] for pieces in heard]


def alone_and_among_others(policy: LengthPolicy | None, ask: Callable[[int], Ask]) -> list[tuple[list[int], list[int]]]:
    """Of each seed its text alone and beside others who came first."""
    found = []
    for seed in SEEDS:
        crowd = [Ask(p, 30, Sampling(1.0), seed=100 + i) for i, p in enumerate(OTHERS)]
        found.append((written(drawing_engine(policy), [ask(seed)])[0], written(drawing_engine(policy), [*crowd, ask(seed)])[-1]))
    return found


def sampled(seed: int) -> Ask:
    return Ask(PROMPT, 24, Sampling(1.0), seed=seed)


@pytest.mark.parametrize(
    ("policy", "ask"),
    [
        (None, sampled),
        (ByLoad(DRAFTS), lambda seed: Ask(PROMPT, 24, Sampling(1.0), seed=seed, speculate=False)),
        (ByLoad(DRAFTS), lambda seed: Ask(PROMPT, 24)),
    ],
    ids=["drafts of a fixed length", "without drafts", "greedy"],
)
def test_whoever_else_is_there(policy: LengthPolicy | None, ask: Callable[[int], Ask]) -> None:
    found = alone_and_among_others(policy, ask)
    assert [among for _, among in found] == [alone for alone, _ in found]


def test_drafts_by_load_give_the_random_numbers_to_other_choices() -> None:
    """Were it otherwise, the page could promise more."""
    assert any(alone != among for alone, among in alone_and_among_others(ByLoad(DRAFTS), sampled))


def test_a_server_with_drafts_of_a_fixed_length_keeps_the_promise() -> None:
    with running(engine=drawing_engine(), policy="fixed") as server:
        body = {"prompt": list(PROMPT), "max_tokens": 24, "temperature": 1, "seed": 11, "ignore_eos": True}
        first = ask_server(server, body)
        assert server.engine.counters.drafted > server.engine.counters.accepted > 0
        crowd = [threading.Thread(target=ask_server, args=(server, {**body, "prompt": list(p), "max_tokens": 150, "seed": i})) for i, p in enumerate(OTHERS)]
        for thread in crowd:
            thread.start()
        again = [ask_server(server, body) for _ in range(3)]
        for thread in crowd:
            thread.join()
    assert again == [first] * 3


def ask_server(server: Running, body: dict[str, object]) -> str:
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])
