"""Acceptance by prompt length, for one or several packaged drafters of a target.

    python benchmarks/long_context.py smollm2 --package runs/full/package --package runs/windowed/package --json

Prompts are the built-in passages, one after another until the length is reached, with a question about the last of them; no two prompts begin
alike. Answers are greedy, by the reference engine. For each length: acceptance length pooled over requests, their mean, the mean of the best
tenth (at least one), and what the drafter's session holds in memory. Lengths go from 1,024 in doublings to what the target can read, on a CPU to 8,192 at
most; those that are given are cut to the target's limit, too. The last line is one JSON object: `ratio` is the pooled acceptance length at the longest
prompts over that at the shortest, the least of all packages, and `memory_growth` what the session holds there over what it holds here, by package.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from firesteel import recipe as recipes
from firesteel.artifact import package_versions
from firesteel.cli.screen import ConsoleScreen
from firesteel.decoding.decode import decode_speculative
from firesteel.evaluation.machine import machine_facts
from firesteel.prompts.sources import load_sources
from firesteel.prompts.template import encode_prompt
from firesteel.recipe import load_recipe
from firesteel.stages.line import Line
from firesteel.stages.runtime import FullVocabulary, package_parts
from firesteel.target.session import TargetSession

ON_CPU = 8192  # longest prompt where nobody asked for longer
QUESTION = "What is said in the last passage? Answer in a few sentences."


def passages(line: Line) -> list[str]:
    """The texts of the built-in prompts that bring a text along."""
    sources = [recipes.Source(builtin=name) for name in ("rag", "summarization")]
    found = load_sources(line.recipe.prompts.model_copy(update={"sources": sources}), "train").prompts
    return [str(p.history([])[-1]["content"]) for p in found]


def make_prompts(tokenizer: Any, texts: Sequence[str], length: int, count: int) -> list[list[int]]:
    """`count` prompts of about `length` tokens (never more), each beginning with another passage."""
    sizes = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 2 for text in texts]
    prompts = []
    for number in range(count):
        chosen, total, at = [], 64, number * len(texts) // count
        while total + sizes[at % len(texts)] <= length:
            chosen.append(texts[at % len(texts)])
            total += sizes[at % len(texts)]
            at += 1
        prompts.append(encode_prompt(tokenizer, [{"role": "user", "content": "\n\n".join([*chosen, QUESTION])}]))
    return prompts


def pick_lengths(given: str | None, room: int, on_cpu: bool) -> list[int]:
    """Prompt lengths, ascending, each once.

    Args:
        given: comma-separated; None: doublings of 1,024 and the longest that may be.
        room: tokens that a prompt may have, so that the answer still fits the target.
    """
    most = min(room, ON_CPU) if on_cpu and given is None else room
    wanted = [int(n) for n in given.split(",")] if given is not None else [n for n in (1024 * 2**i for i in range(16)) if n < most] + [most]
    return sorted({min(n, most) for n in wanted})


def growth(rows: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """By package: a figure at the longest prompts over that at the shortest."""
    found = {}
    for package in dict.fromkeys(str(r["package"]) for r in rows):
        own = sorted((r for r in rows if r["package"] == package), key=lambda r: r["length"])
        found[package] = own[-1][key] / own[0][key]
    return found


def session_bytes(session: Any) -> int:
    """What a drafter's session keeps of the text."""
    return sum(t.numel() * t.element_size() for t in (getattr(session, name) for name in session.kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--package", required=True, type=Path, action="append")
    parser.add_argument("--lengths", help="comma-separated, cut to what the target can read; by default doublings from 1024 to that (on a CPU to 8192)")
    parser.add_argument("--prompts", type=int, default=10, help="of each length")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args()
    line = Line(load_recipe(given.recipe, given.overrides), ConsoleScreen())
    lengths = pick_lengths(given.lengths, line.target.spec.max_position_embeddings - given.tokens - 1, line.target.device.type == "cpu")
    texts = passages(line)
    longest = max(lengths) + given.tokens + 1
    rows = []
    for package in given.package:
        parts = package_parts(line.target, package)
        target, drafter = TargetSession(line.target.model, parts.config.layer_ids, max_length=longest), parts.session(longest)
        for length in lengths:
            prompts = make_prompts(line.target.tokenizer, texts, length, given.prompts)
            with torch.inference_mode():
                done = [
                    decode_speculative(
                        target, FullVocabulary(drafter), p, draft_tokens=parts.config.num_drafts, max_new_tokens=given.tokens, eos_ids=line.target.spec.eos_ids
                    )
                    for p in prompts
                ]
            each = sorted((d.acceptance_length for d in done if d.rounds), reverse=True)
            rounds = sum(len(d.rounds) for d in done)
            rows.append(
                {
                    "package": str(package),
                    "window": parts.config.sliding_window if "sliding_attention" in parts.config.layer_types else None,
                    "length": length,
                    "prompt_tokens": statistics.mean(map(len, prompts)),
                    "requests": len(each),
                    "pooled": 1 + sum(r.accepted for d in done for r in d.rounds) / max(1, rounds),
                    "mean": statistics.mean(each),
                    "top_decile": statistics.mean(each[: max(1, len(each) // 10)]),
                    "session_mb": session_bytes(drafter) / 2**20,
                }
            )
            print(f"{package} {length}: pooled {rows[-1]['pooled']:.3f}, best tenth {rows[-1]['top_decile']:.2f}, {rows[-1]['session_mb']:.1f} MB", flush=True)
    result = {"benchmark": "long_context", "ratio": min(growth(rows, "pooled").values()), "memory_growth": growth(rows, "session_mb"), "rows": rows}
    result |= {"recipe": line.recipe.model_dump(), "lengths": lengths, "versions": package_versions(), "machine": machine_facts(accelerator=None).model_dump()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
