"""Tiny targets and drafters with known distributions, and a way to run a random program through all of its outcomes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from firesteel.decoding.sampling import Sampling

T = TypeVar("T", bound=Hashable)
Table = Callable[[tuple[int, ...]], Tensor]


@dataclass
class ToyStep:
    logits: Tensor
    aux: Tensor


@dataclass
class ToyTarget:
    """A target given by its conditional distributions; its captured state of a position is the token there, `[n, 1]`."""

    table: Table
    max_length: int = 64
    tokens: list[int] = field(default_factory=list)
    passes: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def forward(self, tokens: Sequence[int] | Tensor, *, keep: int | None = None) -> ToyStep:
        assert len(self.tokens) + len(tokens) <= self.max_length
        self.passes += 1
        rows = []
        for token in torch.as_tensor(tokens).tolist():
            self.tokens.append(token)
            rows.append(self.table(tuple(self.tokens)).log())
        return ToyStep(torch.stack(rows)[-(keep or len(rows)) :], torch.as_tensor(tokens, dtype=torch.float64)[:, None])

    def rewind(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]


@dataclass
class ToyDraft:
    tokens: list[int]
    probs: Tensor | None
    confidences: list[float] | None


@dataclass
class ToyDrafter:
    """Draws from its own conditional distributions, given the text it was shown through captured states.

    `confidence(context, token)` makes the confidence of a token; an honest one ignores the token itself.
    """

    table: Table
    chance: Enumerated
    confidence: Callable[[tuple[int, ...], int], float] | None = None
    deterministic: bool = False
    seen: list[int] = field(default_factory=list)

    def observe(self, tokens: object, aux: Tensor) -> None:
        self.seen += [int(x) for x in aux[:, 0]]

    def rewind(self, length: int) -> None:
        del self.seen[length:]

    def draft(self, anchor: int, count: int, *, temperature: float, generator: torch.Generator | None) -> ToyDraft:
        context, tokens, probs, confidences = (*self.seen, anchor), [], [], []
        for _ in range(count):
            row = self.table(context)
            token = int(row.argmax()) if self.deterministic else self.chance.pick(row)
            if self.confidence is not None:
                confidences.append(self.confidence(context, token))
            tokens.append(token)
            probs.append(row)
            context = (*context, token)
        return ToyDraft(tokens, None if self.deterministic else torch.stack(probs), confidences if self.confidence else None)


class Enumerated:
    """Random choices as a script: repeats a given path of choices, then takes the first possible one, and remembers the others."""

    def __init__(self, path: Sequence[int]) -> None:
        self.script = list(path)
        self.path: list[int] = []
        self.siblings: list[list[int]] = []
        self.weight = 1.0

    def accept(self, probability: float) -> bool:
        return self._choose([1 - probability, probability]) == 1

    def pick(self, probabilities: Tensor) -> int:
        return self._choose((probabilities.double() / probabilities.double().sum()).tolist())

    def _choose(self, weights: list[float]) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        if len(self.path) < len(self.script):
            choice = self.script[len(self.path)]
        else:
            choice = possible[0]
            self.siblings += [[*self.path, other] for other in possible[1:]]
        self.path.append(choice)
        self.weight *= weights[choice]
        return choice


def all_outcomes(program: Callable[[Enumerated], T]) -> dict[T, float]:
    """The exact distribution of what a program returns, by running it once for each sequence of random choices."""
    found: dict[T, float] = {}
    todo: list[list[int]] = [[]]
    while todo:
        chance = Enumerated(todo.pop())
        result = program(chance)
        todo += chance.siblings
        found[result] = found.get(result, 0.0) + chance.weight
    assert math.isclose(sum(found.values()), 1, abs_tol=1e-9)
    return found


def random_table(vocabulary: int, seed: int, *, support: Sequence[int] | None = None, memory: int = 3) -> Table:
    """Distributions, one for each of the last `memory` tokens, float64; zero outside `support`."""
    known: dict[tuple[int, ...], Tensor] = {}

    def table(context: tuple[int, ...]) -> Tensor:
        key = context[-memory:]
        if key not in known:
            generator = torch.Generator().manual_seed(seed + 1009 * sum((t + 1) * (vocabulary + 1) ** i for i, t in enumerate(key)))
            weights = torch.rand(vocabulary, generator=generator, dtype=torch.float64) ** 3 + 0.01
            if support is not None:
                weights = weights * torch.tensor([float(v in support) for v in range(vocabulary)], dtype=torch.float64)
            known[key] = weights / weights.sum()
        return known[key]

    return table


def by_hand(table: Table, sampling: Sampling) -> Table:
    """The distributions that sampling means, written out so as not to lean on the code under test."""

    def cut(context: tuple[int, ...]) -> Tensor:
        if sampling.greedy:
            raise AssertionError("greedy is tested by its texts")
        p = [x ** (1 / sampling.temperature) if x > 0 else 0.0 for x in table(context).tolist()]
        p = [x if x >= sampling.min_p * max(p) else 0.0 for x in p]
        order = sorted(range(len(p)), key=lambda v: -p[v])
        for v in order[sampling.top_k :] if sampling.top_k is not None else []:
            p[v] = 0.0
        total, whole = 0.0, sum(p)
        for v in order:
            if total >= sampling.top_p * whole:
                p[v] = 0.0
            total += p[v]
        return torch.tensor([x / sum(p) for x in p], dtype=torch.float64)

    return cut


# Temperature, top-k, top-p and min-p in every combination; of four tokens.
COMBINATIONS = [Sampling(*values) for values in itertools.product((0.6, 1.0, 1.5), (None, 3), (1.0, 0.9), (0.0, 0.15))]
# Rows in which one of these cuts takes a token that no other would: top-k, top-p, min-p; and one that top-k and top-p cut alike.
_EDGES = ((0.28, 0.26, 0.24, 0.22), (0.475, 0.43, 0.09, 0.005), (0.875, 0.12, 0.003, 0.002), (0.41, 0.32, 0.19, 0.08))


def edge_table(temperature: float) -> Table:
    """Distributions over four tokens that become `_EDGES` at this temperature, in an order and with a likeliest token that depend on the text."""

    def table(context: tuple[int, ...]) -> Tensor:
        place = sum((t + 1) * 5**i for i, t in enumerate(reversed(context[-3:])))
        row = torch.tensor(_EDGES[place % 4], dtype=torch.float64).roll(place // 4 % 4) ** temperature
        return row / row.sum()

    return table


def texts(table: Table, prompt: tuple[int, ...], length: int, eos: set[int]) -> dict[tuple[int, ...], float]:
    """What the target alone writes, multiplied out: tuples of up to `length` new tokens and their probabilities."""
    if length == 0:
        return {(): 1.0}
    found: dict[tuple[int, ...], float] = {}
    for token, probability in enumerate(table(prompt).tolist()):
        if probability > 0:
            rest = {(): 1.0} if token in eos else texts(table, (*prompt, token), length - 1, eos)
            for tail, p in rest.items():
                found[(token, *tail)] = found.get((token, *tail), 0.0) + probability * p
    return found


def distance(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys())
