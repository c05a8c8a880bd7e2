"""Engine: continuous batching of prefill, drafting and verification.

A step takes whatever every request needs next - a piece of its prompt, or its newest token with the drafts behind it - and runs it as
one flattened batch: nothing is padded to the longest. Prompts are read in pieces, so that a long one delays the others' tokens only a
little. A request enters when the cache has blocks for its prompt; where blocks run out, the request that came last gives its own back and
reads its text again later. Beginnings that another request has had are not read again (`blocks`).

Every request writes what it would write alone: `verify` and `policies` say why drafts and their number do not change the distribution, and
each request has its own random numbers. (In float32 a token's logits may differ in the last bits with the size of a step.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.judge import Case, judge
from firesteel.decoding.batched.protocol import Ask, BatchTarget, Counters, Piece
from firesteel.decoding.policies import Drafted, FixedLength, LengthPolicy, Request
from firesteel.decoding.sampling import Chance, RandomChance
from firesteel.decoding.verify import Rejection
from firesteel.drafters.rows import BatchDrafter, Draft, Want
from firesteel.errors import DataError, RecipeError, VerificationError
from firesteel.kernels.spans import Span

# Positions that the drafter has not observed yet are held back while nothing is drafted, at most this many a request; where the policy does
# not want prompts observed, at most so many of all requests together.
_HELD, _HELD_IN_ALL = 256, 4096

Tell = Callable[[Piece], None]


@dataclass(eq=False)
class _Run:
    """A request inside."""

    key: int
    ask: Ask
    tell: Tell
    tokens: list[int]  # prompt and answer
    chance: Chance
    generator: torch.Generator
    policy: Request = field(default_factory=Request)
    blocks: list[int] = field(default_factory=list)
    length: int = 0  # positions in the target's cache
    seen: int = 0  # of these, positions that the drafter has observed
    held: list[Tensor] = field(default_factory=list)  # states of the others
    published: int = 0  # blocks
    deaf: bool = False  # the drafter has not observed all of it and never will
    gone: bool = False

    @property
    def produced(self) -> int:
        return len(self.tokens) - len(self.ask.prompt)

    @property
    def writing(self) -> bool:
        """All but the newest token has been read, and that is one of the answer's."""
        return self.length == len(self.tokens) - 1 and self.produced > 0

    @property
    def late(self) -> int:
        """Positions of the prompt that have been read and not observed."""
        return max(0, min(self.length, len(self.ask.prompt)) - self.seen)


@dataclass
class _Part:
    """What a step runs of one request: tokens, how many of the last need logits, and the drafts among them."""

    run: _Run
    tokens: list[int]
    keep: int
    draft: Draft | None = None


class Engine:
    """Requests in, pieces of answers out; one thread calls it.

    Args:
        target, drafter: what runs; no drafter decodes plainly.
        pool: blocks of their caches.
        draft_tokens: drafts of a round at most.
        policy: how many are drafted and verified; None: as many as there can be.
        max_requests: requests in one step at most; others wait.
        max_tokens: tokens in one step at most, as far as prompts are concerned.

    Raises:
        RecipeError: limits that allow nothing.
    """

    def __init__(
        self,
        target: BatchTarget,
        drafter: BatchDrafter | None,
        pool: BlockPool,
        *,
        draft_tokens: int = 0,
        policy: LengthPolicy | None = None,
        rejection: Rejection = "token",
        max_requests: int = 16,
        max_tokens: int = 512,
    ) -> None:
        if drafter is not None and not 1 <= draft_tokens <= drafter.num_drafts:
            raise RecipeError(
                f"draft_tokens={draft_tokens}: this drafter drafts 1 to {drafter.num_drafts}", mend=f"set serve.tokens to at most {drafter.num_drafts}"
            )
        if max_requests < 1 or max_tokens < 1:
            raise RecipeError(f"max_requests={max_requests} and max_tokens={max_tokens} allow no step", mend="give 1 or more")
        self.target, self.drafter, self.pool = target, drafter, pool
        self.draft_tokens, self.rejection = draft_tokens, rejection
        self.policy: LengthPolicy = policy or FixedLength(draft_tokens)
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.counters = Counters(by_position=[0] * draft_tokens)
        self._waiting: deque[_Run] = deque()
        self._running: list[_Run] = []
        self._keys = 0
        self._charged = 0.0  # seconds of this step in which prompts were observed

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return min(self.target.max_length, self.pool.blocks * self.pool.size - self._scratch())

    def check(self, ask: Ask) -> None:
        """Refuse what can never be run.

        Raises:
            DataError: an empty prompt.
            RecipeError: no output allowed, or more than the cache can hold.
        """
        if not ask.prompt:
            raise DataError("the prompt has no tokens", mend="give at least one token, such as the text's first")
        if ask.max_new_tokens < 1:
            raise RecipeError(f"max_new_tokens={ask.max_new_tokens} allows no output", mend="give 1 or more")
        if len(ask.prompt) + ask.max_new_tokens > self.max_length:
            raise RecipeError(
                f"a prompt of {len(ask.prompt)} tokens and an answer of up to {ask.max_new_tokens} exceed the {self.max_length} positions of a request",
                mend="shorten the prompt or ask for a shorter answer",
            )

    def submit(self, ask: Ask, tell: Tell, *, chance: Chance | None = None) -> int:
        """Queue a request; `tell` is called within `step` for every piece of its answer, the last one with `finish`.

        Args:
            chance: where this engine's own random choices come from; None draws from the request's generator.

        Returns:
            a number to cancel it by.

        Raises:
            DataError, RecipeError: as `check`.
        """
        self.check(ask)
        self._keys += 1
        generator = torch.Generator()
        if ask.seed is None:
            generator.seed()
        else:
            generator.manual_seed(ask.seed)
        self._waiting.append(_Run(self._keys, ask, tell, list(ask.prompt), chance or RandomChance(generator), generator))
        return self._keys

    def cancel(self, key: int) -> bool:
        """End a request; its listener is told `abort`. False where it is not here (any more)."""
        for run in (*self._running, *self._waiting):
            if run.key == key:
                self._end(run, Piece([], [], [], finish="abort"))
                return True
        return False

    def step(self) -> bool:
        """Run one step; False where there is nothing to do."""
        self._admit_waiting()
        if not self._running:
            return False
        begin, self._charged = time.perf_counter(), 0.0
        writing = [r for r in self._running if r.writing]
        drafts, said, kept = self._draft(writing)
        parts = self._parts(writing, drafts)
        reading = any(not p.run.writing for p in parts)
        flat = torch.tensor([t for p in parts for t in p.tokens])
        spans = [Span(p.run.key, p.run.blocks, p.run.length, len(p.tokens)) for p in parts]
        logits, aux = self.target.forward(flat, spans, [p.keep for p in parts])
        self.counters.steps += 1
        self.counters.step_tokens += len(flat)
        accepted = self._take(parts, logits, aux)
        took = time.perf_counter() - begin
        if reading or self._charged:
            self.policy.charge(self._charged, took if reading else 0.0)
        stepped = [i for i, r in enumerate(writing) if r.key in accepted]
        if stepped:
            # A step that also read prompts took longer than its drafts account for.
            seconds = None if reading else took - self._charged
            requests, standing = [writing[i].policy for i in stepped], [accepted[writing[i].key] for i in stepped]
            self.policy.learn(requests, [said[i] for i in stepped], [kept[i] for i in stepped], standing, seconds)
        return True

    def _scratch(self) -> int:
        return 1 if self.drafter is None else max(self.drafter.scratch, self.draft_tokens) + 1

    # Entering and leaving.

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._running) < self.max_requests:
            run = self._waiting[0]
            if self.pool.needed(len(run.tokens) + self._scratch()) > self.pool.available:
                return
            self._waiting.popleft()
            # A request that is not drafted for, or hardly, takes what the target has read of it before; the drafter need not have observed it.
            without = self.drafter is None or not run.ask.speculate
            run.blocks = self.pool.share_prefix(run.tokens, deaf=without or self.policy.hearing != "at once")
            run.length, run.seen = len(run.blocks) * self.pool.size, self.pool.heard(run.blocks) * self.pool.size
            run.published, run.deaf = len(run.blocks), without or run.seen < run.length
            self.pool.grow(run.blocks, len(run.tokens) + self._scratch())
            self._running.append(run)

    def _room(self, run: _Run, positions: int) -> bool:
        """Blocks for this many positions of a request; others that came later may have to leave for it. False where it has left itself."""
        if run not in self._running:
            return False
        while not self.pool.grow(run.blocks, positions):
            last = self._running[-1]
            self._leave(last)
            self._waiting.appendleft(last)
            self.counters.preemptions += 1
            if last is run:
                return False
        return True

    def _leave(self, run: _Run) -> None:
        """Out of the running ones, with nothing left in the caches."""
        self._running.remove(run)
        self.pool.release(run.blocks)
        run.length = run.seen = run.published = 0
        run.held.clear()
        self.target.forget(run.key)
        if self.drafter is not None:
            self.drafter.forget(run.key)

    def _end(self, run: _Run, piece: Piece) -> None:
        if run in self._running:
            self._leave(run)
        else:
            self._waiting.remove(run)
        run.gone = True
        run.tell(piece)

    # One step.

    def _draft(self, writing: Sequence[_Run]) -> tuple[list[Draft | None], list[Drafted], list[int]]:
        """For each request what is submitted to verification, what was said of the draft, and how many of it are submitted."""
        made: list[Draft | None] = [None] * len(writing)
        if self.drafter is None or not writing:
            return made, [Drafted(0)] * len(writing), [0] * len(writing)
        requests, hearing = [r.policy for r in writing], self.policy.hearing
        for run in writing:
            # A round adds a token of the target's own after the drafted ones, so the last token needs no draft.
            run.policy.room = 0 if run.deaf or (run.late and hearing == "not") else min(self.draft_tokens, run.ask.max_new_tokens - run.produced - 1)
        counts = self.policy.plan(requests)
        chosen = [i for i, n in enumerate(counts) if n and self._room(writing[i], len(writing[i].tokens) + self._scratch())]
        self._show([writing[i] for i in chosen])
        for i, proposal in zip(chosen, self._propose([(writing[i], counts[i]) for i in chosen]), strict=True):
            made[i] = proposal
        said = [Drafted(0) if p is None else Drafted(len(p.tokens), p.confidences) for p in made]
        kept = self.policy.admit(requests, said)
        return [None if p is None or n == 0 else _cut(p, n) for p, n in zip(made, kept, strict=True)], said, kept

    def _propose(self, wanted: Sequence[tuple[_Run, int]]) -> list[Draft]:
        if self.drafter is None or not wanted:
            return []
        wants = [Want(Span(r.key, r.blocks, r.length, 0), r.tokens[-1], n, r.ask.sampling.temperature, r.generator) for r, n in wanted]
        made = self.drafter.draft(wants)
        for want, proposal in zip(wants, made, strict=True):
            if len(proposal.tokens) != want.count:
                raise VerificationError(f"the drafter was asked for {want.count} tokens and proposed {len(proposal.tokens)}")
        return made

    def _parts(self, writing: Sequence[_Run], drafts: Sequence[Draft | None]) -> list[_Part]:
        found = []
        for run, draft in zip(writing, drafts, strict=True):
            tokens = [run.tokens[-1], *(draft.tokens if draft is not None else ())]
            if self._room(run, run.length + len(tokens)):
                found.append(_Part(run, tokens, len(tokens), draft))
        budget = self.max_tokens - sum(len(p.tokens) for p in found)
        for run in [r for r in self._running if not r.writing]:
            count = min(len(run.tokens) - run.length, budget)
            if count > 0 and self._room(run, run.length + count):
                whole = run.length + count == len(run.tokens)
                found.append(_Part(run, run.tokens[run.length : run.length + count], 1 if whole else 0))
                budget -= count
        return [p for p in found if p.run in self._running]

    def _take(self, parts: Sequence[_Part], logits: Tensor, aux: Tensor) -> dict[int, int]:
        """Verify, write down, tell and clean up; accepted drafts by request."""
        cases = [Case(p.run.ask, p.run.chance, p.keep, p.run.produced, p.draft) for p in parts]
        accepted: dict[int, int] = {}
        begin = 0
        for part, found in zip(parts, judge(cases, logits, self.rejection), strict=True):
            run, states = part.run, aux[begin : begin + len(part.tokens)]
            begin += len(part.tokens)
            if run.gone:  # a listener has cancelled it meanwhile
                continue
            if found is None:
                self._advance(run, len(part.tokens), states)
                continue
            verdict, piece = found
            accepted[run.key] = verdict.accepted
            self._advance(run, len(part.tokens) - piece.submitted + verdict.accepted, states)
            self._count(run, verdict.accepted, piece)
            run.tokens += piece.tokens
            if piece.finish is None:
                run.tell(piece)
            else:
                self._end(run, piece)
        staying = [p.run for p in parts if not p.run.gone]
        self._hear(staying)
        for run in staying:
            run.published = self.pool.publish(run.tokens, run.blocks, run.length, run.published, self._heard(run))
        return accepted

    def _hear(self, runs: Sequence[_Run]) -> None:
        """The drafter observes at once what it was drafted for, and prompts where the policy wants it; positions written without it may wait."""
        if self.policy.hearing == "at once":
            self._show([r for r in runs if r.late or not r.writing or r.policy.silent == 0 or r.length - r.seen >= _HELD])
            return
        self._show([r for r in runs if not r.late and r.writing and r.policy.silent == 0])
        waiting = sorted((r for r in self._running if r.held), key=lambda r: r.length - r.seen)
        held = sum(r.length - r.seen for r in waiting)
        while held > _HELD_IN_ALL:
            run = waiting.pop()
            held -= run.length - run.seen
            run.held.clear()
            run.deaf = True

    def _heard(self, run: _Run) -> int | None:
        """Positions of which the drafter's share of the blocks is there for others, too; None: all."""
        if self.drafter is None:
            return None
        return run.seen if self.drafter.shares_prefix else 0

    def _count(self, run: _Run, accepted: int, piece: Piece) -> None:
        counters = self.counters
        if run.produced == 0:
            counters.prompt_tokens += len(run.ask.prompt)
        counters.generated_tokens += len(piece.tokens)
        if piece.submitted:
            counters.rounds += 1
            counters.drafted += piece.submitted
            counters.accepted += accepted
            for k in range(accepted):
                counters.by_position[k] += 1

    def _advance(self, run: _Run, count: int, states: Tensor) -> None:
        run.length += count
        if not run.deaf:
            run.held.append(states[:count])

    def _show(self, runs: Sequence[_Run]) -> None:
        """Let the drafter observe what is held back for these requests, in one go."""
        late = [r for r in runs if r.held]
        if not late or self.drafter is None:
            return
        spans = [Span(r.key, r.blocks, r.seen, r.length - r.seen) for r in late]
        tokens = torch.tensor([t for r in late for t in r.tokens[r.seen : r.length]])
        begin = time.perf_counter()
        self.drafter.observe(tokens, spans, torch.cat([s for r in late for s in r.held]))
        prompts = sum(r.late for r in late)
        if prompts:
            self._charged += (time.perf_counter() - begin) * prompts / len(tokens)
        for run in late:
            # What was published as read by the target alone is published once more.
            run.published, run.seen = min(run.published, run.seen // self.pool.size), run.length
            run.held.clear()


def _cut(draft: Draft, count: int) -> Draft:
    probs = None if draft.probs is None else draft.probs[:count]
    return Draft(draft.tokens[:count], probs, draft.confidences)
