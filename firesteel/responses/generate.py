"""Batched generation with a KV cache: how tokens are chosen, and padded batches, which finished rows leave."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.target.batch import TransformersBatch

_NUCLEUS = 512  # likeliest tokens that are looked at first: sorting a whole vocabulary costs more than the forward pass
_COMPACT_SHARE = 0.75  # rows leave the cache when fewer than this share of it still write


@dataclass(frozen=True)
class Ask:
    """One thing to answer: rendered prompt tokens, and a name that seeds its sampling."""

    name: str
    token_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """What the target said: `token_ids` include the end token where `finish_reason` is `stop` (else `length`)."""

    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0


class Row:
    """A prompt that is being answered: `index` among the asked, tokens so far, and how it draws."""

    def __init__(self, index: int, ask: Ask, sampling: Sampling) -> None:
        self.index, self.most = index, sampling.max_new_tokens
        self.tokens: list[int] = []
        digest = hashlib.sha256(f"{sampling.seed}/{ask.name}".encode()).digest()
        # A generator of its own: the answer does not depend on which other prompts share the batch.
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def add(self, token: int, ends: set[int]) -> Answer | None:
        """The answer, if this token ends it."""
        self.tokens.append(token)
        if token in ends:
            return Answer(self.tokens, "stop")
        return Answer(self.tokens, "length") if len(self.tokens) == self.most else None


def generate_batch(session: TransformersBatch, asks: Sequence[Ask], sampling: Sampling, eos_ids: Sequence[int]) -> list[Answer]:
    """Answer every prompt of one batch."""
    ends = set(eos_ids)
    rows = [Row(i, ask, sampling) for i, ask in enumerate(asks)]
    answers: list[Answer | None] = [None] * len(asks)
    logits = session.start([a.token_ids for a in asks])
    while True:
        chosen = choose(logits, sampling, [r.generator for r in rows])
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if answers[row.index] is None:
                answers[row.index] = row.add(token, ends)
        live = [i for i, r in enumerate(rows) if answers[r.index] is None]
        if not live:
            return [a for a in answers if a is not None]
        if len(live) <= _COMPACT_SHARE * len(rows):
            keep = torch.tensor(live)
            session.keep(keep)
            chosen, rows = chosen[keep.to(chosen.device)], [rows[i] for i in live]
        logits = session.step(chosen)


def choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """Pick a token per row: `[B, V]` float logits -> `[B]` int64."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k is None and sampling.top_p >= 1:
        return _draw(logits.softmax(-1), generators)
    count = min(_NUCLEUS if sampling.top_k is None else sampling.top_k, logits.shape[-1])
    ordered, tokens = logits.topk(count, dim=-1)
    total = (ordered if sampling.top_k is not None else logits).logsumexp(-1, keepdim=True)
    probs = (ordered - total).exp()
    picks = tokens.gather(-1, _draw(_nucleus(probs, sampling.top_p), generators)[:, None])[:, 0]
    if sampling.top_k is None:  # flat rows, whose nucleus may be larger than what was looked at
        for row in (probs.sum(-1) < sampling.top_p).nonzero()[:, 0].tolist():
            probs, tokens = logits[row].softmax(-1).sort(descending=True)
            picks[row] = tokens[_draw(_nucleus(probs[None], sampling.top_p), generators[row : row + 1])[0]]
    return picks


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Descending `[B, n]` -> the same, zero outside the smallest set with mass `top_p`: a token stays if the mass before it is
    below, so the likeliest always does."""
    return probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)


def _draw(weights: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One index per row of non-negative `[B, n]`, by inverting the cumulative distribution: a row costs one random number."""
    reach = weights.double().cumsum(-1)
    chance = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators]).to(reach.device)
    return torch.searchsorted(reach, (chance * reach[:, -1])[:, None], right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
