"""What the batched engine asks of a target, what is asked of it, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from firesteel.decoding.logprobs import TokenLogprob
from firesteel.decoding.sampling import Sampling
from firesteel.kernels.spans import Span

# `abort` where the request was cancelled.
Finish = Literal["stop", "length", "abort"]


class BatchTarget(Protocol):
    """A target over the flattened tokens of many sequences."""

    max_length: int
    shares_prefix: bool

    def forward(self, tokens: Tensor, spans: Sequence[Span], keep: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run `tokens` `[N]`, the spans' one after another; whatever a sequence had cached behind its span's start is forgotten.

        Returns:
            logits `[sum(keep), V]` float32 of the last `keep[i]` tokens of span i; captured states `[N, m * d]`.
        """
        ...

    def forget(self, key: int) -> None:
        """The sequence has left."""
        ...


GREEDY = Sampling()


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        prompt: token ids, at least one.
        seed: of this request's random choices; None: a new one.
        eos_ids: tokens that end the answer (empty: none does).
        stop: told every token that joins the answer but an end-of-text one; True ends the answer with it (`endings.AnswerText.add`).
        logprobs: log-probabilities of the tokens, with those of this many likeliest beside; None: none.
        speculate: False decodes this request without the drafter.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    seed: int | None = None
    eos_ids: frozenset[int] = frozenset()
    stop: Callable[[int], bool] | None = None
    logprobs: int | None = None
    speculate: bool = True


@dataclass(frozen=True)
class Piece:
    """What a step added to an answer.

    Attributes:
        tokens: in order; an end-of-text token, where one ended the answer, is the last of them.
        drafted: of each whether the drafter proposed it; the others are the target's own.
        confidences: of each what the drafter said of it, None where it said nothing.
        logprobs: one for each token where asked for, else empty.
        submitted: drafts that this step verified for the request.
        finish: why the answer is complete, or None.
    """

    tokens: list[int]
    drafted: list[bool]
    confidences: list[float | None]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    submitted: int = 0
    finish: Finish | None = None


@dataclass
class Counters:
    """What was done since the engine began; `by_position[k]` counts rounds in which draft k + 1 was accepted."""

    steps: int = 0
    step_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    by_position: list[int] = field(default_factory=list)
