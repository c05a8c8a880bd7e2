"""Stage `prompts`: from the recipe's sources to three files of prompts: train, validation, eval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from firesteel.artifact import Artifact, ArtifactWriter, hash_file, hash_json, write_atomic
from firesteel.errors import DataError, RecipeError
from firesteel.prompts.conversation import Prompt, prompt_from_row
from firesteel.prompts.dedupe import dedupe
from firesteel.prompts.dropped import Dropped
from firesteel.prompts.sources import BUILTIN_FOLDER
from firesteel.prompts.synthesis import UNSEEDED, accept_synthesized, continuation, draw_seed, synthesis_prefix
from firesteel.prompts.template import keep_fitting
from firesteel.prompts.trial import hides_tools, try_template
from firesteel.recipe import Source
from firesteel.responses.generate import Ask, Sampling
from firesteel.responses.generator import Generator
from firesteel.responses.kept import KeptAnswers
from firesteel.stages.line import Line

T = TypeVar("T")
NAME = "prompts"
SPLITS = ("train", "validation", "eval")
_WORK = "synthesized.jsonl"
_ROUNDS = 4  # prompts asked for at a time, in batches: a few are written for nothing at the end, and the batch stays full till then
_OPENED = 320  # tokens behind an opening: some kinds of prompts bring a text along
_SYNTHESIS = Sampling(max_new_tokens=160, temperature=1.0, top_p=0.95)


def run(line: Line) -> Artifact:
    """Read, check, synthesise, dedupe and split the prompts."""
    recipe = line.recipe
    settings = {"prompts": recipe.prompts.model_dump(), "seed": recipe.seed, "target": target_settings(line), "data": _source_hashes(line)}
    try:
        return line.stage(NAME, settings, {}, lambda writer: _make(line, writer), drop=(_WORK,))
    finally:
        line.forget_sources()


def read_prompts(artifact: Artifact, split: str) -> list[Prompt]:
    """The prompts of a split, in order."""
    # Not splitlines(): prompts may hold line separators such as U+2028, which JSON strings need not escape.
    lines = (artifact / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
    return [prompt_from_row(json.loads(text)) for text in lines if text]


def target_settings(line: Line) -> dict[str, Any]:
    """What of the target's settings changes its output; the device and threads do not. Of a file with a template its content counts."""
    settings = line.recipe.target.model_dump(include={"model", "revision", "dtype", "chat_template"})
    template = line.recipe.target.chat_template
    if template is not None and (file := Path(template).expanduser()).is_file():
        settings["chat_template"] = hash_file(file)
    options = line.recipe.target.template_options
    return {**settings, "template_options": options} if options else settings


def target_identity(line: Line) -> dict[str, Any]:
    """The settings, and what is in memory of them: other weights or another template may have been saved under the same name."""
    return {**target_settings(line), "fingerprint": line.target.spec.fingerprint, "template": hash_json(line.target.tokenizer.chat_template)}


def _make(line: Line, writer: ArtifactWriter) -> dict[str, Any]:
    settings, tokenizer = line.recipe.prompts, line.target.tokenizer
    rewriting = try_template(tokenizer, line.target.spec.eos_ids)
    dropped, notes = Dropped(), Dropped()
    loaded: dict[str, list[Prompt]] = {}
    for split in ("train", "eval"):
        found = line.sources(split)
        loaded[split] = list(found.prompts)
        dropped.merge(found.dropped)
        notes.merge(found.notes)
    given, kept = {split: list(rows) for split, rows in loaded.items()}, KeptAnswers(writer / _WORK, line.target.spec.fingerprint)
    for number, source in enumerate(settings.sources):
        if source.synthesize is not None:
            loaded[source.split] += _synthesize(line, source, number, given[source.split], dropped, kept)
    fitting = {split: keep_fitting(tokenizer, rows, settings.max_tokens, dropped) for split, rows in loaded.items()}
    unique = dedupe(fitting["train"], fitting["eval"], settings.near_duplicate)
    dropped.merge(unique.dropped)
    train, validation = _set_aside(unique.train, settings.validation)
    rows = {"train": train, "validation": validation, "eval": unique.held_out}
    for split in ("train", "validation", "eval"):
        if not rows[split]:
            raise DataError(
                f"no {split} prompt is left of {sum(len(v) for v in loaded.values())} rows; dropped: {'; '.join(dropped.lines()) or 'none'}",
                mend="give more rows in prompts.sources (split: train and split: eval), or raise prompts.max_tokens",
            )
        write_atomic(writer / f"{split}.jsonl", "".join(json.dumps(p.to_row(), ensure_ascii=False) + "\n" for p in rows[split]))
    for prompt in (p for found in rows.values() for p in found):
        if hides_tools(tokenizer, prompt):
            notes.add("the chat template does not show the prompt's tools: it is asked without them", prompt.where)
        if rewriting and len(prompt.slots) > 1:
            notes.add(f"in the chat template {rewriting}", prompt.where)
    for text in [*dropped.lines(), *notes.lines()]:
        line.screen.say(f"prompts: {text}")
    counts = {split: len(found) for split, found in rows.items()}
    line.screen.say("prompts: " + ", ".join(f"{n} {split}" for split, n in counts.items()))
    return {"prompts": counts, "dropped": dropped.to_dict(), "notes": notes.to_dict(), "domains": _domains(rows)}


def _set_aside(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Every domain gives its evenly spaced share (at least one, if it has two) to validation."""
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    chosen: set[str] = set()
    for members in by_domain.values():
        count = min(max(1, round(share * len(members))), len(members) - 1)
        chosen |= {members[(2 * i + 1) * len(members) // (2 * count)].key for i in range(count)}
    return [p for p in prompts if p.key not in chosen], [p for p in prompts if p.key in chosen]


def _synthesize(line: Line, source: Source, number: int, known: Sequence[Prompt], dropped: Dropped, kept: KeptAnswers) -> list[Prompt]:
    """Let the target continue its own empty user turn, or openings of known prompts, until enough usable prompts are there (at most three
    times as many tries). What it wrote before a kill is `kept`.

    Raises:
        RecipeError: no known prompt is of a domain in `like`.
    """
    target, recipe = line.target, line.recipe
    count = source.synthesize or 0
    like = [p for p in known if p.domain in source.like]
    if missing := sorted(set(source.like) - {p.domain for p in like}):
        raise RecipeError(
            f"prompts.sources[{number}].like names {missing[0]!r}, and no prompt of another source (split {source.split}) is of that domain",
            mend=f"domains there: {', '.join(sorted({p.domain for p in known})) or 'none'}",
        )
    generator = Generator(target.model, recipe.responses.batch_size, recipe.responses.precision)
    special = set(target.tokenizer.all_special_ids)
    found: list[Prompt] = []
    tried, size = 0, _ROUNDS * recipe.responses.batch_size
    longest = min(_OPENED, recipe.prompts.max_tokens) if like else _SYNTHESIS.max_new_tokens
    sampling = Sampling(longest, _SYNTHESIS.temperature, _SYNTHESIS.top_p, seed=recipe.seed)
    with line.screen.bar("synthesising prompts", count) as bar:
        while len(found) < count and tried < 3 * count:
            names = [f"synthesis/{number}/{tried + i}" for i in range(min(size, 3 * count - tried))]
            seeds = [draw_seed(like, Random(f"{recipe.seed}/{name}")) if like else UNSEEDED for name in names]
            asks = [Ask(name, synthesis_prefix(target.tokenizer, seed)) for name, seed in zip(names, seeds, strict=True)]
            for ask, seed, answer in zip(asks, seeds, kept.answers(generator, asks, sampling, target.spec.eos_ids), strict=True):
                tried += 1
                if answer.finish_reason == "length":
                    dropped.add("synthesized text too long", f"synthesized-{tried}")
                    continue
                if special & set(answer.token_ids[:-1]):
                    dropped.add("synthesized text holds special tokens", f"synthesized-{tried}")
                    continue
                text = continuation(target.tokenizer, ask.token_ids, answer.token_ids)
                made = accept_synthesized(text, number=tried, domain=source.domain, seed=seed)
                if isinstance(made, str):
                    dropped.add(made, f"synthesized-{tried}")
                else:
                    found.append(made)
            bar.set(min(len(found), count))
    return found[:count]


def _source_hashes(line: Line) -> list[str]:
    """Contents of the sources that are files here, so that a changed file makes the stage run again."""
    hashes = []
    for source in line.recipe.prompts.sources:
        if source.path is not None and Path(source.path).expanduser().is_file():
            hashes.append(hash_file(Path(source.path).expanduser()))
        if source.builtin is not None:
            hashes += [hash_file(p) for p in sorted(BUILTIN_FOLDER.rglob("*.jsonl*"))]
    return hashes


def _domains(rows: dict[str, list[Prompt]]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for split, prompts in rows.items():
        for prompt in prompts:
            counts.setdefault(prompt.domain, dict.fromkeys(SPLITS, 0))[split] += 1
    return counts


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` evenly spaced items; prompts come domain by domain in turn, so every domain has its share."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def spread_domains(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """At most `count` prompts: the first of every domain, then the second, and so on; of a round that does not fit, evenly spaced domains."""
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    chosen: list[Prompt] = []
    for turn in range(max(map(len, by_domain.values()), default=0)):
        chosen += spread([members[turn] for members in by_domain.values() if turn < len(members)], count - len(chosen))
    return chosen
