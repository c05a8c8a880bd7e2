"""The prompts that ship with the package."""

from __future__ import annotations

import json
import re

import pytest

from firesteel.prompts.dedupe import dedupe
from firesteel.prompts.sources import BUILTIN_FOLDER, builtin_domains, load_source
from firesteel.recipe import Source

DOMAINS = ["code", "math_reasoning", "qa", "question", "rag", "summarization", "tool_call", "translation", "writing"]


def test_there_are_nine_domains() -> None:
    assert builtin_domains() == DOMAINS


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_row_is_usable_as_it_stands(domain: str) -> None:
    rows = [json.loads(line) for line in (BUILTIN_FOLDER / f"{domain}.jsonl").read_text().splitlines()]
    train, held_out = (load_source(Source(builtin=domain, split=split)) for split in ("train", "eval"))
    assert len(train.prompts) >= 60
    assert len(held_out.prompts) >= 12
    assert len(train.prompts) + len(held_out.prompts) == len(rows)
    assert train.dropped.total == held_out.dropped.total == 0
    assert train.notes.total == held_out.notes.total == 0
    assert {r["domain"] for r in rows} == {domain}
    assert len({r["id"] for r in rows}) == len(rows)
    assert all(m["role"] in ("system", "user") for r in rows for m in r["messages"])
    if domain == "tool_call":
        assert all(r.get("tools") for r in rows)


@pytest.mark.parametrize("name", ["smollm2-written", "smollm2-written-2", "smollm2-nine-domains"])
def test_what_a_target_wrote_is_usable_and_no_held_out_prompt(name: str) -> None:
    written = load_source(Source(builtin=name))
    assert len(written.prompts) > 2900
    assert written.dropped.total == written.notes.total == 0
    domains = {p.domain for p in written.prompts}
    assert domains == (set(DOMAINS) if name == "smollm2-nine-domains" else {name})
    held_out = load_source(Source(builtin="nine-domains", split="eval")).prompts
    assert len(held_out) >= 12 * len(DOMAINS)
    assert [reason for reason in dedupe(written.prompts, held_out, 0.5).dropped.to_dict() if "held-out" in reason] == []


def test_no_two_are_nearly_the_same() -> None:
    texts: list[tuple[str, frozenset[tuple[str, ...]]]] = []
    for domain in DOMAINS:
        for line in (BUILTIN_FOLDER / f"{domain}.jsonl").read_text().splitlines():
            row = json.loads(line)
            words = re.findall(r"\w+", " ".join(m["content"] for m in row["messages"] if m["role"] == "user").lower())
            texts.append((row["id"], frozenset(tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4)))))
    # Only pairs with a run of words in common can be similar at all.
    holders: dict[tuple[str, ...], list[int]] = {}
    for i, (_, runs) in enumerate(texts):
        for run in runs:
            holders.setdefault(run, []).append(i)
    pairs = {(i, j) for found in holders.values() for i in found for j in found if i < j}
    near = [(texts[i][0], texts[j][0]) for i, j in pairs if len(texts[i][1] & texts[j][1]) > 0.5 * len(texts[i][1] | texts[j][1])]
    assert near == []
