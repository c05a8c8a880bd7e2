"""What a step's logits decide for each request: which drafts stand, what follows them, and where the answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from firesteel.decoding.batched.protocol import Ask, Finish, Piece
from firesteel.decoding.logprobs import TokenLogprob, token_logprobs
from firesteel.decoding.sampling import Chance, distributions
from firesteel.decoding.verify import Rejection, Verdict, verify_greedy, verify_tokens
from firesteel.drafters.rows import Draft


@dataclass(frozen=True)
class Case:
    """One request's share of a step.

    Attributes:
        keep: rows of logits that are its own: 0 within a prompt, 1 + drafts where tokens follow.
        produced: tokens of its answer so far.
        draft: what was submitted for it, if anything.
    """

    ask: Ask
    chance: Chance
    keep: int
    produced: int
    draft: Draft | None

    @property
    def drafts(self) -> list[int]:
        return [] if self.draft is None else self.draft.tokens


def judge(cases: Sequence[Case], logits: Tensor, rejection: Rejection) -> list[tuple[Verdict, Piece] | None]:
    """`logits [sum(keep), V]`, row after row of each case -> for each what stands and what it adds to the answer; None within a prompt.

    All requests at temperature 0 are decided by one look at the logits.
    """
    best: list[int] = logits.argmax(-1).tolist() if any(c.keep and c.ask.sampling.greedy for c in cases) else []
    found: list[tuple[Verdict, Piece] | None] = []
    begin = 0
    for case in cases:
        rows, end = logits[begin : begin + case.keep], begin + case.keep
        if not case.keep:
            found.append(None)
            continue
        verdict = verify_greedy(case.drafts, best[begin:end]) if case.ask.sampling.greedy else _sampled(case, rows, rejection)
        found.append((verdict, _piece(case, verdict, rows)))
        begin = end
    return found


def _sampled(case: Case, rows: Tensor, rejection: Rejection) -> Verdict:
    if case.draft is None or not case.draft.tokens:
        return Verdict(0, case.chance.pick(distributions(rows[0], case.ask.sampling)))
    return verify_tokens(case.draft.tokens, case.draft.probs, rows, case.ask.sampling, case.chance, rejection)


def _piece(case: Case, verdict: Verdict, rows: Tensor) -> Piece:
    """The verdict's tokens up to the first that ends the answer."""
    ask, tokens = case.ask, []
    finish: Finish | None = None
    for token in (*case.drafts[: verdict.accepted], verdict.next_token):
        tokens.append(token)
        # A stop string may lie in the text of the last token there is room for: the listener is told of every token first.
        if token in ask.eos_ids or (ask.stop is not None and ask.stop(token)):
            finish = "stop"
        elif case.produced + len(tokens) == ask.max_new_tokens:
            finish = "length"
        if finish is not None:
            break
    logprobs: list[TokenLogprob] = [] if ask.logprobs is None else token_logprobs(rows, tokens, ask.logprobs)
    stands = min(verdict.accepted, len(tokens))
    said = (case.draft.confidences if case.draft else None) or ()
    confidences = [said[k] if k < stands and k < len(said) else None for k in range(len(tokens))]
    return Piece(tokens, [k < stands for k in range(len(tokens))], confidences, logprobs, len(case.drafts), finish)
