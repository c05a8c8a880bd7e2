"""Exact and near-duplicates, within and between the training and the held-out prompts.

Near means Jaccard similarity |A & B| / |A | B| of the sets of 5-word shingles at or above a threshold. The search
is exact: with all shingles in one global order, two sets of similarity >= t share a shingle among the first
|A| - ceil(t |A|) + 1 of each (prefix filtering: Chaudhuri, Ganti, Kaushik, "A Primitive Operator for Similarity
Joins in Data Cleaning", ICDE 2006; Bayardo, Ma, Srikant, "Scaling Up All Pairs Similarity Search", WWW 2007).
Rare shingles come first in that order, so few candidates are compared.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from firesteel.prompts.conversation import Prompt
from firesteel.prompts.dropped import Dropped

SHINGLE_WORDS = 5
# Scripts without spaces count by character, or a sentence would be one word. Operators count: 3 + 4 is not 3 - 4.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[-+*/=<>^%]")


@dataclass(frozen=True)
class Deduped:
    """Prompts that are left, and how many were not, by reason."""

    train: list[Prompt]
    held_out: list[Prompt]
    dropped: Dropped


def dedupe(train: Sequence[Prompt], held_out: Sequence[Prompt], threshold: float) -> Deduped:
    """Keep the first of equal or near-equal prompts; what is held out wins over what is trained on.

    Args:
        threshold: similarity from which two prompts are near-duplicates, in (0, 1].
    """
    dropped = Dropped()
    sets = {p.key: shingles(p) for p in (*held_out, *train)}
    rarity = Counter(s for one in sets.values() for s in one)
    index = _Index(threshold, rarity)
    kept_held_out = _keep(held_out, sets, index, dropped, "held-out", {})
    owner = dict.fromkeys((p.key for p in kept_held_out), "held-out")
    kept_train = _keep(train, sets, index, dropped, "training", owner)
    return Deduped(kept_train, kept_held_out, dropped)


def shingles(prompt: Prompt) -> frozenset[int]:
    """64-bit hashes of the runs of five words in the turns (system turns, which many prompts share, left out).

    A text of fewer words is one shingle; one without any (emoji, say) is itself a word.
    """
    text = "\n".join(m["content"] for m in prompt.messages if m["role"] != "system").casefold()
    words = _WORD.findall(text) or [text]
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    runs = {" ".join(words[i : i + SHINGLE_WORDS]) for i in starts}
    return frozenset(int.from_bytes(hashlib.blake2b(r.encode(), digest_size=8).digest(), "little") for r in runs)


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """|A & B| / |A | B|; 1 for two empty sets."""
    union = len(a | b)
    return len(a & b) / union if union else 1.0


@dataclass
class _Index:
    """Kept sets by the shingles of their prefixes."""

    threshold: float
    rarity: Counter[int]
    sets: list[frozenset[int]] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    holders: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def prefix(self, one: frozenset[int]) -> list[int]:
        ordered = sorted(one, key=lambda s: (self.rarity[s], s))
        # The small slack keeps 0.8 * 5 = 4.000000000000001 from shortening the prefix.
        return ordered[: len(one) - math.ceil(self.threshold * len(one) - 1e-9) + 1]

    def find(self, one: frozenset[int]) -> str | None:
        """Owner of the first kept set that is near, or None."""
        candidates = {i for s in self.prefix(one) for i in self.holders.get(s, ())}
        for i in sorted(candidates):
            if jaccard(one, self.sets[i]) >= self.threshold - 1e-9:
                return self.owners[i]
        return None

    def add(self, one: frozenset[int], owner: str) -> None:
        for s in self.prefix(one):
            self.holders[s].append(len(self.sets))
        self.sets.append(one)
        self.owners.append(owner)


def _keep(prompts: Sequence[Prompt], sets: dict[str, frozenset[int]], index: _Index, dropped: Dropped, owner: str, seen: dict[str, str]) -> list[Prompt]:
    kept = []
    for prompt in prompts:
        if prompt.key in seen:
            dropped.add(f"{owner} prompt equal to a {seen[prompt.key]} one", prompt.where)
            continue
        near = index.find(sets[prompt.key])
        if near is not None:
            dropped.add(f"{owner} prompt nearly equal to a {near} one", prompt.where)
            continue
        seen[prompt.key] = owner
        index.add(sets[prompt.key], owner)
        kept.append(prompt)
    return kept
