from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.prompts.conversation import Prompt
from firesteel.prompts.dedupe import dedupe, jaccard, shingles


def ask(text: str, name: str = "x", system: str | None = None) -> Prompt:
    first = [{"role": "system", "content": system}] if system else []
    return Prompt(name, "qa", [*first, {"role": "user", "content": text}], None, name)


def reference(a: str, b: str) -> float:
    """Jaccard of 5-word shingles for texts of plain lower-case words, by definition."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.split(" +", text)
        return {tuple(words[i : i + 5]) for i in range(len(words) - 4)} if len(words) >= 5 else {tuple(words)}

    one, two = runs(a), runs(b)
    return len(one & two) / len(one | two)


def greedy(texts: list[str], kept: list[str], threshold: float) -> list[str]:
    """Compare everything with everything kept so far."""
    mine: list[str] = []
    for text in texts:
        if all(reference(text, other) < threshold for other in kept + mine):
            mine.append(text)
    return mine


WORDS = st.lists(st.sampled_from("ab"), min_size=1, max_size=14).map(" ".join)


@settings(max_examples=120, deadline=None)
@given(st.lists(WORDS, max_size=12), st.lists(WORDS, max_size=6), st.sampled_from([0.1, 0.5, 0.6, 0.8, 1.0]))
def test_search_finds_exactly_what_comparing_all_pairs_finds(train: list[str], held_out: list[str], threshold: float) -> None:
    found = dedupe([ask(t) for t in train], [ask(t) for t in held_out], threshold)
    kept = greedy(held_out, [], threshold)
    assert [p.messages[0]["content"] for p in found.held_out] == kept
    assert [p.messages[0]["content"] for p in found.train] == greedy(train, kept, threshold)
    assert found.dropped.total == len(train) + len(held_out) - len(found.train) - len(found.held_out)


def test_long_texts_at_the_threshold() -> None:
    rng = random.Random(0)
    base = [f"w{rng.randrange(10**6)}" for _ in range(104)]  # 100 shingles
    for changed in range(1, 40):
        other = [*base[: 104 - changed], *(f"v{i}" for i in range(changed))]
        similarity = (100 - changed) / (100 + changed)
        assert jaccard(shingles(ask(" ".join(base))), shingles(ask(" ".join(other)))) == pytest.approx(similarity)
        left = dedupe([ask(" ".join(base)), ask(" ".join(other))], [], 0.8).train
        assert len(left) == (1 if similarity >= 0.8 else 2)


def test_reasons_and_first_examples() -> None:
    text = "please write a long story about the old lighthouse keeper and his dog"
    near = text + "!"
    train = [ask(text, "t1"), ask("something else altogether", "t2"), ask("something else altogether", "t3"), ask("Something else, altogether", "t4")]
    found = dedupe(train, [ask(near, "h1"), ask(text, "h2"), ask(near, "h3")], 0.8)
    assert [p.id for p in found.held_out] == ["h1"]
    assert [p.id for p in found.train] == ["t2"]
    assert found.dropped.first == {
        "held-out prompt nearly equal to a held-out one": "h2",
        "held-out prompt equal to a held-out one": "h3",
        "training prompt nearly equal to a held-out one": "t1",
        "training prompt equal to a training one": "t3",
        "training prompt nearly equal to a training one": "t4",
    }


@pytest.mark.parametrize(
    ("one", "two", "equal"),
    [
        ("What is 3 + 4?", "What is 3 - 4?", False),
        ("What is 3 + 4?", "what is 3 + 4", True),
        ("🔥", "🎉", False),
        ("今天天气怎么样呢", "今天天气怎么样啊", False),
        ("Straße", "STRASSE", True),
    ],
)
def test_words(one: str, two: str, equal: bool) -> None:
    assert (shingles(ask(one)) == shingles(ask(two))) is equal


def test_unspaced_scripts_are_compared_by_character() -> None:
    assert jaccard(shingles(ask("今天天气怎么样呢")), shingles(ask("今天天气怎么样啊"))) == pytest.approx(3 / 5)


def test_system_turns_neither_make_nor_hide_duplicates() -> None:
    shared = "you are a careful assistant that answers at length and always cites the sources it used"
    assert len(dedupe([ask("why", system=shared), ask("how", system=shared)], [], 0.5).train) == 2
    assert len(dedupe([ask("why", system=shared), ask("why", system="other")], [], 0.5).train) == 1
