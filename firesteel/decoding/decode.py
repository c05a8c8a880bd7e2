"""The reference engine, batch 1: plain decoding and speculative decoding with the same output distribution."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from firesteel.decoding.protocol import Drafter, Target
from firesteel.decoding.sampling import Chance, RandomChance, Sampling, distributions
from firesteel.decoding.verify import verified_length, verify_tokens
from firesteel.errors import DataError, RecipeError, VerificationError


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
        finish_reason: `stop` where an end-of-text token came, `length` where `max_new_tokens` did.
        seconds_prefill: the prompt's pass, with the drafter's observation of it and the first token.
        seconds_decode: everything after it, of which `seconds_draft` in the drafter (its observation included) and
            `seconds_verify` in the target's passes and the acceptance rule.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = "length"
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
    generator: torch.Generator | None = None,
    chance: Chance | None = None,
) -> Decoded:
    """Write up to `max_new_tokens` tokens after the prompt, one forward pass each. The target is rewound to 0 first.

    Args:
        chance: where random choices come from; None draws from `generator` (None: PyTorch's global one).

    Raises:
        DataError: an empty prompt.
        RecipeError: settings that allow no output, or more than the target session holds.
    """
    sampling, chance = Sampling(temperature, top_k, top_p), chance or RandomChance(generator)
    done, logits, _ = _prefill(target, prompt_ids, max_new_tokens)
    begin = time.perf_counter()
    token = _choose(logits, sampling, chance)
    while not _extend(done, [token], max_new_tokens, eos_ids):
        token = _choose(target.forward([token]).logits[0], sampling, chance)
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
    generator: torch.Generator | None = None,
    confidence_threshold: float | None = None,
    chance: Chance | None = None,
) -> Decoded:
    """Write what `decode_plain` would (the same tokens when greedy, the same distribution otherwise), several a pass.

    A round: the drafter, which has observed every position before the newest token (the anchor), proposes tokens; the
    target runs anchor and proposals in one pass; the accepted prefix and one token of the target's own join the text;
    the drafter observes the states of the anchor and the accepted tokens; the target's cache is rewound to them.
    Both sessions are rewound to 0 first.

    Args:
        draft_tokens: proposals per round; fewer where fewer can still be used.
        confidence_threshold: submit only the prefix whose product of confidences stays at or above it
            (`verify.verified_length` says why the output distribution stays the target's); None submits everything.
        generator: also handed to the drafter, which draws with it.
        chance: where this engine's own random choices come from; None draws from `generator`.

    Raises:
        DataError: an empty prompt.
        RecipeError: settings that allow no output, or more than the target session holds; a threshold without confidences.
        VerificationError: the drafter proposes another number of tokens than asked, or breaks its contract.
    """
    sampling, chance = Sampling(temperature, top_k, top_p), chance or RandomChance(generator)
    if draft_tokens < 1:
        raise RecipeError(f"draft_tokens={draft_tokens} drafts nothing", mend="give 1 or more, or decode plainly")
    drafter.rewind(0)
    begin = time.perf_counter()
    done, logits, aux = _prefill(target, prompt_ids, max_new_tokens)
    drafter.observe(prompt_ids, aux)
    done.seconds_prefill = time.perf_counter() - begin
    begin = time.perf_counter()
    token = _choose(logits, sampling, chance)
    ended = _extend(done, [token], max_new_tokens, eos_ids)
    while not ended:
        clock, before, start = time.perf_counter(), len(done.tokens), target.length
        # A round adds a token of the target's own after the drafted ones, so the last token needs no draft.
        count = min(draft_tokens, max_new_tokens - before - 1)
        draft = _propose(drafter, token, count, sampling, generator, confidence_threshold)
        drafted = time.perf_counter()
        step = target.forward([token, *draft.tokens])
        verdict = verify_tokens(draft.tokens, draft.probs, step.logits, sampling, chance)
        ended = _extend(done, [*draft.tokens[: verdict.accepted], verdict.next_token], max_new_tokens, eos_ids)
        done.rounds.append(Round(len(draft.tokens), min(verdict.accepted, len(done.tokens) - before), draft.confidences))
        verified = time.perf_counter()
        if not ended:
            target.rewind(start + 1 + verdict.accepted)
            drafter.observe([token, *draft.tokens[: verdict.accepted]], step.aux[: 1 + verdict.accepted])
            token = verdict.next_token
        done.seconds_draft += drafted - clock + time.perf_counter() - verified
        done.seconds_verify += verified - drafted
    done.seconds_decode = time.perf_counter() - begin
    return done


@dataclass
class _Proposal:
    """The part of a draft that is submitted, with all confidences of the draft."""

    tokens: list[int]
    probs: Tensor | None
    confidences: list[float] | None


def _propose(drafter: Drafter, anchor: int, count: int, sampling: Sampling, generator: torch.Generator | None, threshold: float | None) -> _Proposal:
    if count == 0:
        return _Proposal([], None, None)
    draft = drafter.draft(anchor, count, temperature=sampling.temperature, generator=generator)
    tokens: list[int] = torch.as_tensor(draft.tokens).tolist()
    if len(tokens) != count:
        raise VerificationError(f"the drafter was asked for {count} tokens and proposed {len(tokens)}")
    said = draft.confidences
    confidences: list[float] | None = None if said is None else (said.tolist() if isinstance(said, Tensor) else [float(c) for c in said])
    keep = count
    if threshold is not None:
        if confidences is None:
            raise RecipeError(
                "a confidence threshold needs a drafter with a confidence head", mend="leave the threshold empty, or train with drafter.confidence_head=true"
            )
        keep = verified_length(confidences, threshold)
    return _Proposal(tokens[:keep], None if draft.probs is None else draft.probs[:keep], confidences)


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


def _extend(done: Decoded, tokens: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> bool:
    """Append tokens up to the first end of text; True where the answer is complete."""
    for token in tokens:
        done.tokens.append(token)
        if token in eos_ids:
            done.finish_reason = "stop"
            return True
        if len(done.tokens) == max_new_tokens:
            return True
    return False
