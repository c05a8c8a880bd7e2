"""Toy documents and servers that misbehave on command, for the tests of the feed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from firesteel.hidden.feed import Work
from firesteel.hidden.sample import HiddenSample, check_sample, predictable_positions
from firesteel.recipe import Feed

LAYERS, TARGET = (1, 2), "toy"


def make_works(lengths: Sequence[int]) -> list[Work]:
    return [Work(f"d{i}", [(i * 31 + j) % 97 for j in range(n)], [j >= 2 for j in range(n)]) for i, n in enumerate(lengths)]


def make_sample(work: Work) -> HiddenSample:
    generator = torch.Generator().manual_seed(sum(map(ord, work.key)))
    mask = torch.tensor(work.loss_mask)
    positions = predictable_positions(mask)
    aux = torch.randn(len(mask), len(LAYERS), 4, generator=generator)
    return HiddenSample(work.key, torch.tensor(work.token_ids), mask, aux, torch.randn(len(positions), 4, generator=generator), positions, LAYERS, TARGET, None)


def check(sample: HiddenSample) -> None:
    check_sample(sample, layer_ids=LAYERS, target=TARGET)


def quick(**changes: object) -> Feed:
    """Settings for tests: rests a thousand times shorter than in earnest; timeouts long enough for a machine that stalls."""
    values = {"timeout": 20.0, "backoff": 0.01, "backoff_max": 0.05, "outage": 40.0, "retries": 3, **changes}
    return Feed(**values)  # type: ignore[arg-type]


@dataclass
class Servers:
    """`fetch` of a feed. Each endpoint answers after `seconds` times a random factor, unless something is wrong with it."""

    seconds: float = 0.001
    broken: dict[str, str] = field(default_factory=dict)  # endpoint -> refuse, hang, slow, corrupt, others
    corrupt_share: float = 0.0
    poison: dict[str, str] = field(default_factory=dict)  # key -> what happens to it, wherever
    asked: list[tuple[str, str]] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    flying: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    async def fetch(self, endpoint: str, work: Work) -> HiddenSample:
        self.asked.append((endpoint, work.key))
        self.flying[endpoint] += 1
        self.most[endpoint] = max(self.most[endpoint], self.flying[endpoint])
        try:
            return await self._answer(endpoint, work)
        finally:
            self.flying[endpoint] -= 1

    async def _answer(self, endpoint: str, work: Work) -> HiddenSample:
        what = self.poison.get(work.key) or self.broken.get(endpoint) or ("corrupt" if self.chance.random() < self.corrupt_share else "")
        await asyncio.sleep(self.seconds * self.chance.uniform(0.2, 2.0))
        if what == "refuse":
            raise ConnectionRefusedError("nobody listens")
        if what == "hang":
            await asyncio.sleep(1000)
        if what == "slow":
            await asyncio.sleep(0.4)
        sample = make_sample(work)
        self.served[endpoint] += 1
        if what == "corrupt":
            sample.aux[0, 0, 0] = float("nan")
        if what == "others":
            return replace(sample, token_ids=sample.token_ids + 1)
        return sample
