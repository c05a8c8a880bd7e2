"""The reference engine, batch 1: plain decoding and speculative decoding with the same output distribution."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from firesteel.decoding.logprobs import TokenLogprob, token_logprobs
from firesteel.decoding.policies import Drafted, FixedLength, LengthPolicy, Request
from firesteel.decoding.protocol import Drafter, Target
from firesteel.decoding.sampling import Chance, RandomChance, Sampling, distributions
from firesteel.decoding.verify import Rejection, verify_tokens
from firesteel.errors import DataError, RecipeError, VerificationError

# Positions that the drafter has not observed yet are held back while nothing is drafted, at most this many.
_HELD = 256


@dataclass
class Round:
    """One forward pass of the target after the prompt's.

    Attributes:
        drafted: drafted tokens that were submitted to verification (0: the target wrote one token alone).
        accepted: of these, how many stand in the text; what lies behind an end-of-text token does not count.
        confidences: the drafter's confidences of all tokens it proposed, submitted or not; None without them.
    """

    drafted: int
    accepted: int
    confidences: list[float] | None


@dataclass
class Decoded:
    """A decoded answer.

    Attributes:
        tokens: the new tokens; an end-of-text token, where one ended the text, is the last of them.
        rounds: one for each forward pass of the target after the prompt's; empty for plain decoding.
        finish_reason: `stop` where an end-of-text token or a stop string came, `length` where `max_new_tokens` did.
        logprobs: one for each of `tokens`, where asked for; else empty.
        seconds_prefill: the prompt's pass, with the drafter's observation of it and the first token.
        seconds_decode: everything after it, of which `seconds_draft` in the drafter (its observation included) and
            `seconds_verify` in the target's passes and the acceptance rule.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = "length"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    seconds_prefill: float = 0.0
    seconds_decode: float = 0.0
    seconds_draft: float = 0.0
    seconds_verify: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per forward pass of the target after the prompt's: 1 + accepted / rounds (1 for plain decoding)."""
        return 1 + sum(r.accepted for r in self.rounds) / len(self.rounds) if self.rounds else 1.0


def decode_plain(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
    chance: Chance | None = None,
    stop: Callable[[int], bool] | None = None,
    logprobs: int | None = None,
) -> Decoded:
    """Write up to `max_new_tokens` tokens after the prompt, one forward pass each. The target is rewound to 0 first.

    Args:
        chance: where random choices come from; None draws from `generator` (None: PyTorch's global one).
        stop: told every token that joins the answer but an end-of-text one; True ends the answer with it (`endings.AnswerText.add`).
        logprobs: keep log-probabilities, with those of this many likeliest tokens beside; None keeps none.

    Raises:
        DataError: an empty prompt.
        RecipeError: settings that allow no output, or more than the target session holds.
    """
    sampling, chance = Sampling(temperature, top_k, top_p, min_p), chance or RandomChance(generator)
    done, logits, _ = _prefill(target, prompt_ids, max_new_tokens)
    answer = _Answer(done, max_new_tokens, eos_ids, stop, logprobs)
    begin = time.perf_counter()
    while not answer.extend([_choose(logits, sampling, chance)], logits[None]):
        logits = target.forward([done.tokens[-1]]).logits[0]
    done.seconds_decode = done.seconds_verify = time.perf_counter() - begin
    return done


def decode_speculative(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    draft_tokens: int,
    max_new_tokens: int,
    eos_ids: Collection[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
    rejection: Rejection = "token",
    lengths: LengthPolicy | None = None,
    chance: Chance | None = None,
    stop: Callable[[int], bool] | None = None,
    logprobs: int | None = None,
) -> Decoded:
    """Write what `decode_plain` would (the same tokens when greedy, the same distribution otherwise), several a pass.

    A round: the drafter, which has observed every position before the newest token (the anchor), proposes tokens; the
    target runs anchor and proposals in one pass; the accepted prefix and one token of the target's own join the text;
    the drafter observes the states of the anchor and the accepted tokens; the target's cache is rewound to them.
    Both sessions are rewound to 0 first.

    Args:
        draft_tokens: proposals per round at most; fewer where fewer can still be used.
        generator: also handed to the drafter, which draws with it.
        rejection: how drafts are verified when sampling, `token` or `block` (`verify` says why both are lossless).
        lengths: how many tokens are drafted and how many of them verified (`policies`); None: as many as there can be.
        chance: where this engine's own random choices come from; None draws from `generator`.
        stop, logprobs: as in `decode_plain`.

    Raises:
        DataError: an empty prompt.
        RecipeError: settings that allow no output, or more than the target session holds; a policy that needs confidences of a
            drafter without any.
        VerificationError: the drafter proposes another number of tokens than asked, or breaks its contract.
    """
    sampling, chance = Sampling(temperature, top_k, top_p, min_p), chance or RandomChance(generator)
    if draft_tokens < 1:
        raise RecipeError(f"draft_tokens={draft_tokens} drafts nothing", mend="give 1 or more, or decode plainly")
    policy, request = lengths or FixedLength(draft_tokens), Request()
    drafter.rewind(0)
    begin = time.perf_counter()
    done, logits, aux = _prefill(target, prompt_ids, max_new_tokens)
    answer = _Answer(done, max_new_tokens, eos_ids, stop, logprobs)
    drafter.observe(prompt_ids, aux)
    unseen = _Unseen(drafter)
    done.seconds_prefill = time.perf_counter() - begin
    begin = time.perf_counter()
    token = _choose(logits, sampling, chance)
    ended = answer.extend([token], logits[None])
    while not ended:
        clock, before, start = time.perf_counter(), len(done.tokens), target.length
        # A round adds a token of the target's own after the drafted ones, so the last token needs no draft.
        request.room = min(draft_tokens, max_new_tokens - before - 1)
        count = policy.plan([request])[0]
        if count:
            unseen.show()
        draft = _propose(drafter, token, count, sampling, generator)
        said = Drafted(count, draft.confidences)
        keep = policy.admit([request], [said])[0]
        tokens, probs = draft.tokens[:keep], None if draft.probs is None else draft.probs[:keep]
        drafted = time.perf_counter()
        step = target.forward([token, *tokens])
        verdict = verify_tokens(tokens, probs, step.logits, sampling, chance, rejection)
        ended = answer.extend([*tokens[: verdict.accepted], verdict.next_token], step.logits)
        done.rounds.append(Round(keep, min(verdict.accepted, len(done.tokens) - before), draft.confidences))
        verified = time.perf_counter()
        if not ended:
            # No seconds: they differ from run to run, and the same seed shall write the same text.
            policy.learn([request], [said], [keep], [verdict.accepted], None)
            target.rewind(start + 1 + verdict.accepted)
            unseen.add([token, *tokens[: verdict.accepted]], step.aux[: 1 + verdict.accepted])
            if count:
                unseen.show()
            token = verdict.next_token
        done.seconds_draft += drafted - clock + time.perf_counter() - verified
        done.seconds_verify += verified - drafted
    done.seconds_decode = time.perf_counter() - begin
    return done


@dataclass
class _Proposal:
    """A draft as lists; the probabilities `[n, V]`."""

    tokens: list[int]
    probs: Tensor | None
    confidences: list[float] | None


def _propose(drafter: Drafter, anchor: int, count: int, sampling: Sampling, generator: torch.Generator | None) -> _Proposal:
    if count == 0:
        return _Proposal([], None, None)
    draft = drafter.draft(anchor, count, temperature=sampling.temperature, generator=generator)
    tokens: list[int] = torch.as_tensor(draft.tokens).tolist()
    if len(tokens) != count:
        raise VerificationError(f"the drafter was asked for {count} tokens and proposed {len(tokens)}")
    said = draft.confidences
    confidences: list[float] | None = None if said is None else (said.tolist() if isinstance(said, Tensor) else [float(c) for c in said])
    return _Proposal(tokens, draft.probs, confidences)


class _Unseen:
    """Positions that the drafter has yet to observe: while nothing is drafted they wait, since many cost hardly more than one."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._tokens: list[int] = []
        self._aux: list[Tensor] = []

    def add(self, tokens: Sequence[int], aux: Tensor) -> None:
        self._tokens += tokens
        self._aux.append(aux)
        if len(self._tokens) >= _HELD:
            self.show()

    def show(self) -> None:
        if self._tokens:
            self._drafter.observe(self._tokens, torch.cat(self._aux) if len(self._aux) > 1 else self._aux[0])
            self._tokens, self._aux = [], []


@dataclass
class _Answer:
    """A record being filled, and where it ends."""

    done: Decoded
    max_new_tokens: int
    eos_ids: Collection[int]
    stop: Callable[[int], bool] | None
    logprobs: int | None

    def extend(self, tokens: Sequence[int], logits: Tensor) -> bool:
        """Append tokens up to the first that ends the answer, token k chosen from row k of the logits; True where it is complete."""
        before = len(self.done.tokens)
        ended = any(self._append(token) for token in tokens)
        if self.logprobs is not None:
            self.done.logprobs += token_logprobs(logits, self.done.tokens[before:], self.logprobs)
        return ended

    def _append(self, token: int) -> bool:
        self.done.tokens.append(token)
        # A stop string may lie in the text of the last token there is room for: the caller is told of every token first.
        stopped = token in self.eos_ids or (self.stop is not None and self.stop(token))
        if stopped:
            self.done.finish_reason = "stop"
        return stopped or len(self.done.tokens) == self.max_new_tokens


def _prefill(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[Decoded, Tensor, Tensor]:
    """Run the prompt: a record to fill, logits `[V]` after it, states `[T, m * d]` of it."""
    if len(prompt_ids) == 0:
        raise DataError("the prompt has no tokens", mend="give at least one token, such as the text's first")
    if max_new_tokens < 1:
        raise RecipeError(f"max_new_tokens={max_new_tokens} allows no output", mend="give 1 or more")
    # The last token of the text is never run through the target.
    if len(prompt_ids) + max_new_tokens - 1 > target.max_length:
        raise RecipeError(
            f"a prompt of {len(prompt_ids)} tokens and max_new_tokens={max_new_tokens} exceed the {target.max_length} positions of the target session",
            mend="lower max_new_tokens, shorten the prompt, or make the session with a larger max_length",
        )
    target.rewind(0)
    begin = time.perf_counter()
    step = target.forward(prompt_ids, keep=1)
    return Decoded(seconds_prefill=time.perf_counter() - begin), step.logits[-1], step.aux


def _choose(logits: Tensor, sampling: Sampling, chance: Chance) -> int:
    return int(logits.argmax(-1)) if sampling.greedy else chance.pick(distributions(logits, sampling))
