"""The batched engine writes what each request would write alone: greedily the same tokens, otherwise the target's distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from decoding_toys import Enumerated, ToyDrafter, ToyTarget, all_outcomes, by_hand, distance, random_table, texts

from firesteel.decoding.adaptive import AsynchronousScheduler, Scheduler
from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask, Piece
from firesteel.decoding.batched.sessions import SessionDrafter, SessionTarget
from firesteel.decoding.decode import decode_plain
from firesteel.decoding.policies import Drafted, FixedLength, LengthPolicy, Request, StaticThreshold
from firesteel.decoding.profile import Curve, Profile
from firesteel.decoding.sampling import Sampling
from firesteel.decoding.verify import Rejection
from firesteel.errors import DataError, RecipeError

TARGET, DRAFT = random_table(5, 1), random_table(5, 2)


def make_engine(
    *, chance: Enumerated | None = None, policy: LengthPolicy | None = None, blocks: int = 64, draft: bool = True, requests: int = 4, max_tokens: int = 16
) -> Engine:
    def drafter() -> ToyDrafter:
        return ToyDrafter(DRAFT, chance or Enumerated([]), confidence=lambda context, token: 0.5 + 0.1 * (context[-1] % 4), deterministic=chance is None)

    pool = BlockPool(blocks, 4, share=False)
    made = SessionDrafter(drafter, 3) if draft else None
    return Engine(
        SessionTarget(lambda: ToyTarget(TARGET)),
        made,
        pool,
        draft_tokens=3 if draft else 0,
        policy=policy,
        max_requests=requests,
        max_tokens=max_tokens,
    )


def finish(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")


class Listener:
    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def __call__(self, piece: Piece) -> None:
        assert not self.pieces or self.pieces[-1].finish is None, "told after the end"
        self.pieces.append(piece)

    @property
    def tokens(self) -> list[int]:
        return [t for p in self.pieces for t in p.tokens]


def alone(prompt: tuple[int, ...], count: int, eos: frozenset[int] = frozenset()) -> list[int]:
    return decode_plain(ToyTarget(TARGET), prompt, max_new_tokens=count, eos_ids=eos).tokens


PROMPTS = [(0,), (1, 2, 3), (4, 4, 1, 0, 2), (2,) * 21, (3, 1), (0, 1, 2, 3, 4, 0, 1)]


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("blocks", [64, 14])
def test_greedy_requests_write_what_they_would_alone(draft: bool, blocks: int) -> None:
    engine = make_engine(draft=draft, blocks=blocks)
    eos = frozenset({3})
    listeners = [Listener() for _ in PROMPTS]
    for prompt, listener in zip(PROMPTS, listeners, strict=True):
        engine.submit(Ask(prompt, 20, eos_ids=eos), listener)
        engine.step()
    finish(engine)
    for prompt, listener in zip(PROMPTS, listeners, strict=True):
        assert listener.tokens == alone(prompt, 20, eos)
        assert listener.pieces[-1].finish == ("stop" if listener.tokens[-1] == 3 else "length")
    assert engine.pool.used == 0
    assert engine.counters.prompt_tokens == sum(map(len, PROMPTS))
    assert engine.counters.generated_tokens == sum(len(x.tokens) for x in listeners)
    assert (engine.counters.accepted > 0) == draft


def test_requests_that_run_out_of_blocks_leave_and_come_back() -> None:
    engine = make_engine(blocks=12)
    listeners = [Listener() for _ in range(4)]
    for i, listener in enumerate(listeners):
        engine.submit(Ask((i, 1), 30), listener)
    finish(engine)
    assert engine.counters.preemptions > 0
    assert [x.tokens for x in listeners] == [alone((i, 1), 30) for i in range(4)]
    assert engine.counters.prompt_tokens == 8, "a prompt that is read again is no new prompt"


def profile() -> Profile:
    """Costs by which some drafts pay and others do not."""
    return Profile(Curve((1, 8), (1.0, 2.6)), Curve((1, 4), (0.02, 0.04)))


POLICIES: dict[str, Callable[[], LengthPolicy] | None] = {
    "plain": None,
    "fixed": lambda: FixedLength(2),
    "threshold": lambda: StaticThreshold(0.5),
    "scheduled": lambda: Scheduler(profile(), prior=[0.6]),
    "asynchronous": lambda: AsynchronousScheduler(profile(), prior=[0.6]),
}


@dataclass
class Remembering:
    """A policy, and what it decided: of each step the drafts of each request, and how many of them are verified."""

    inner: LengthPolicy
    decided: set[tuple[tuple[int, ...], tuple[int, ...]]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        kept = self.inner.admit(requests, drafts)
        self.decided.add((tuple(d.count for d in drafts), tuple(kept)))
        return kept


@pytest.mark.lossless
@pytest.mark.parametrize("rejection", ["token", "block"])
@pytest.mark.parametrize("policy", POLICIES)
def test_two_sampled_requests_have_the_targets_distribution(policy: str, rejection: Rejection) -> None:
    """Every outcome of two requests of several rounds in the same steps, each with a sampling of its own."""
    # The asynchronous policy follows the step before the last, so it needs a round more than the others.
    lengths = (5, 4) if policy == "asynchronous" else (4, 4)
    samplings = (Sampling(temperature=1.0), Sampling(temperature=0.6, top_p=0.9, min_p=0.15))
    table, other, make = random_table(2, 5), random_table(2, 6), POLICIES[policy]
    decided: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def program(chance: Enumerated) -> tuple[tuple[int, ...], tuple[int, ...]]:
        def drafter() -> ToyDrafter:
            return ToyDrafter(other, chance, confidence=lambda context, token: 0.35 + 0.5 * (context[-1] % 2))

        made = {} if make is None else {"draft_tokens": 2, "policy": Remembering(make(), decided)}
        target, pool = SessionTarget(lambda: ToyTarget(table)), BlockPool(32, 4, share=False)
        engine = Engine(target, SessionDrafter(drafter, 2) if made else None, pool, rejection=rejection, **made)  # type: ignore[arg-type]
        listeners = [Listener(), Listener()]
        for i, listener in enumerate(listeners):
            engine.submit(Ask((i,), lengths[i], samplings[i], eos_ids=frozenset({0})), listener, chance=chance)
        finish(engine)
        return tuple(listeners[0].tokens), tuple(listeners[1].tokens)

    found = all_outcomes(program)
    first, second = (texts(by_hand(table, s), (i,), n, {0}) for i, (s, n) in enumerate(zip(samplings, lengths, strict=True)))
    wanted = {(a, b): p * q for a, p in first.items() for b, q in second.items()}
    assert distance(found, wanted) < 1e-9  # type: ignore[arg-type]
    if policy in ("threshold", "scheduled", "asynchronous"):
        cut = {kept for counts, kept in decided if kept != counts}
        assert cut, "it chooses among drafts"
        assert any(any(kept) for kept in cut), "and some are verified"


def test_a_seed_writes_the_same_text_whoever_else_is_there() -> None:
    ask = Ask((1, 2), 12, Sampling(temperature=1.0), seed=7)
    alone_, beside = Listener(), Listener()
    engine = make_engine(draft=False)
    engine.submit(ask, alone_)
    finish(engine)
    for prompt in PROMPTS:
        engine.submit(Ask(prompt, 9, Sampling(temperature=1.0)), Listener())
    engine.step()
    engine.submit(ask, beside)
    finish(engine)
    assert alone_.tokens == beside.tokens


def test_cancelled_requests_free_their_blocks_and_disturb_nobody() -> None:
    engine = make_engine(requests=2)
    listeners = [Listener() for _ in range(4)]
    keys = [engine.submit(Ask((i, 2, 1), 15), x) for i, x in enumerate(listeners)]
    engine.step()
    engine.step()
    assert engine.running == 2
    assert engine.cancel(keys[0])
    assert engine.cancel(keys[3])
    assert not engine.cancel(keys[0])
    finish(engine)
    assert [x.pieces[-1].finish for x in listeners] == ["abort", "length", "length", "abort"]
    assert listeners[1].tokens == alone((1, 2, 1), 15)
    assert engine.pool.used == 0


def test_a_listener_may_cancel_another_request_in_the_middle_of_a_step() -> None:
    engine = make_engine()
    victim, other = Listener(), Listener()

    def first(piece: Piece) -> None:
        if keys[1:]:
            engine.cancel(keys[1])

    keys = [engine.submit(Ask((0,), 6), first)]
    keys.append(engine.submit(Ask((1,), 6), victim))
    engine.submit(Ask((2,), 6), other)
    finish(engine)
    assert victim.pieces[-1].finish == "abort"
    assert other.tokens == alone((2,), 6)
    assert engine.pool.used == 0


def test_pieces_tell_drafted_tokens_from_the_targets_own() -> None:
    engine = make_engine()
    heard = Listener()
    engine.submit(Ask((1, 2, 3), 25, logprobs=2), heard)
    finish(engine)
    assert sum(sum(p.drafted) for p in heard.pieces) == engine.counters.accepted > 0
    for piece in heard.pieces:
        assert len(piece.tokens) == len(piece.drafted) == len(piece.confidences) == len(piece.logprobs)
        assert [c is not None for c in piece.confidences] == piece.drafted
        assert [x.token for x in piece.logprobs] == piece.tokens
    context = (1, 2, 3)
    for piece in heard.pieces:
        for x in piece.logprobs:
            assert x.logprob == pytest.approx(float(TARGET(context)[x.token].log()))
            context = (*context, x.token)


def test_stop_and_no_speculation() -> None:
    engine = make_engine()
    text = alone((1, 2, 3), 25)
    stopped, plain = Listener(), Listener()
    seen: list[int] = []

    def stop(token: int) -> bool:
        seen.append(token)
        return len(seen) == 7

    engine.submit(Ask((1, 2, 3), 25, stop=stop), stopped)
    finish(engine)
    rounds = engine.counters.rounds
    engine.submit(Ask((1, 2, 3), 25, speculate=False), plain)
    finish(engine)
    assert stopped.tokens == text[:7]
    assert stopped.pieces[-1].finish == "stop"
    assert plain.tokens == text
    assert engine.counters.rounds == rounds


def test_what_can_never_run_is_refused() -> None:
    engine = make_engine(blocks=8)
    with pytest.raises(DataError, match="no tokens"):
        engine.submit(Ask((), 4), Listener())
    with pytest.raises(RecipeError, match="allows no output"):
        engine.submit(Ask((1,), 0), Listener())
    with pytest.raises(RecipeError, match="exceed the 28 positions"):
        engine.submit(Ask((1,) * 20, 9), Listener())
    with pytest.raises(RecipeError, match="drafts 1 to 3"):
        Engine(SessionTarget(lambda: ToyTarget(TARGET)), SessionDrafter(lambda: ToyDrafter(DRAFT, Enumerated([])), 3), BlockPool(4, 4), draft_tokens=4)


def test_long_prompts_are_read_in_pieces_while_others_write() -> None:
    engine = make_engine(max_tokens=4, draft=False)
    short, long = Listener(), Listener()
    engine.submit(Ask((1,), 12), short)
    engine.submit(Ask((2,) * 21, 2), long)
    told = 0
    for _ in range(4):
        engine.step()
        told = len(short.pieces)
    assert told == 4
    assert not long.pieces
    finish(engine)
    assert long.tokens == alone((2,) * 21, 2)


class TestBlockPool:
    def test_beginnings_are_shared_and_kept_until_their_room_is_needed(self) -> None:
        pool = BlockPool(6, 2)
        a: list[int] = []
        assert pool.grow(a, 5)
        done = pool.publish([1, 2, 3, 4, 5], a, 5, 0)
        assert done == 2
        b = pool.share_prefix([1, 2, 3, 4, 9])
        assert b == a[:2]
        assert pool.used == 3
        pool.release(a)
        assert pool.used == 2
        pool.release(b)
        assert (pool.used, pool.available) == (0, 6)
        assert pool.share_prefix([1, 2]) == [], "the last token is always read"
        c = pool.share_prefix([1, 2, 8])
        d: list[int] = []
        assert pool.grow(d, 10)
        assert pool.available == 0
        assert not pool.grow(d, 12)
        assert len(d) == 5
        assert pool.share_prefix([1, 2, 3, 4, 9]) == c, "the second block was given away, the first is in use"

    def test_the_same_text_twice_at_once(self) -> None:
        pool = BlockPool(8, 2)
        a, b = [], []
        pool.grow(a, 6)
        pool.grow(b, 6)
        text = [1, 2, 3, 4, 5, 6]
        done = pool.publish(text, a, 2, 0)
        other = pool.publish(text, b, 4, 0)
        assert (done, other) == (1, 2)
        pool.publish(text, a, 4, done)
        shared = pool.share_prefix([*text])
        assert shared == [a[0], b[1]]
        for held in (a, b, shared):
            pool.release(held)
        assert pool.available == 8

    def test_what_the_drafter_has_not_observed_is_for_requests_without_it(self) -> None:
        pool = BlockPool(8, 2)
        text, deaf, whole = [1, 2, 3, 4, 5, 6, 7], [], []
        pool.grow(deaf, 7)
        pool.publish(text, deaf, 6, 0, heard=3)
        assert pool.share_prefix(text) == deaf[:1], "the second block is observed by half"
        without = pool.share_prefix(text, deaf=True)
        assert without == deaf[:3]
        assert pool.heard(without) == 1
        for held in (without, [deaf[0]]):
            pool.release(held)
        # Another request reads it again and has it observed: its blocks stand in for the others.
        pool.grow(whole, 7)
        pool.publish(text, whole, 6, 0, heard=6)
        again = pool.share_prefix(text)
        assert again == [deaf[0], *whole[1:3]]
        assert pool.heard(again) == 3
        for held in (again, whole, deaf):
            pool.release(held)
        assert pool.available == 8

    def test_a_late_observation_opens_what_was_published_without_it(self) -> None:
        pool = BlockPool(8, 2)
        text, held = [1, 2, 3, 4, 5], []
        pool.grow(held, 5)
        pool.publish(text, held, 4, 0, heard=0)
        assert pool.share_prefix(text) == []
        pool.publish(text, held, 4, 0, heard=4)
        assert pool.share_prefix(text) == held[:2]

    def test_an_idle_block_that_is_replaced_is_free(self) -> None:
        pool = BlockPool(3, 2)
        text, deaf, whole = [1, 2, 3], [], []
        pool.grow(deaf, 2)
        pool.publish(text, deaf, 2, 0, heard=0)
        pool.release(deaf)
        pool.grow(whole, 2)
        pool.publish(text, whole, 2, 0, heard=2)
        rest: list[int] = []
        assert pool.grow(rest, 4)
        assert pool.share_prefix(text) == whole

    def test_nothing_leaks_under_random_use(self) -> None:
        generator = torch.Generator().manual_seed(0)
        pool = BlockPool(12, 2)
        texts_: list[tuple[list[int], list[int], int]] = []
        for _ in range(2000):
            move = int(torch.randint(3, (1,), generator=generator))
            if move == 0:
                text = torch.randint(2, (int(torch.randint(2, 12, (1,), generator=generator)),), generator=generator).tolist()
                without = bool(torch.randint(2, (1,), generator=generator))
                held = pool.share_prefix(text, deaf=without)
                start, heard = len(held), 2 * pool.heard(held) if without else len(text)
                if pool.grow(held, len(text)):
                    texts_.append((text, held, pool.publish(text, held, len(text), start, heard)))
                else:
                    pool.release(held)
            elif texts_ and move == 1:
                pool.release(texts_.pop(int(torch.randint(len(texts_), (1,), generator=generator)))[1])
            owners = [0] * 12
            for _, held, _ in texts_:
                for block in held:
                    owners[block] += 1
            assert pool.used == sum(n > 0 for n in owners)
        for _, held, _ in texts_:
            pool.release(held)
        assert pool.available == 12

    def test_a_cache_of_nothing_is_refused(self) -> None:
        with pytest.raises(RecipeError, match="holds nothing"):
            BlockPool(0, 16)
