"""Answers of the target in this process: over blocks, in both precisions, beside padded batches of the model's own forward pass.

All arms answer the same prompts greedily, in turn. `ratio` is tokens per second of `blocks` over `padded`, median of the turns; `same_answers` the share
of answers that are the padded ones token by token, in float32 and in bfloat16 (a rounded product decides between near-equal tokens).

Usage: python benchmarks/generate.py RECIPE [section.key=value ...] [--prompts 192] [--turns 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch

from firesteel.artifact import package_versions
from firesteel.cli.screen import ConsoleScreen
from firesteel.evaluation.machine import machine_facts
from firesteel.prompts.sources import load_sources
from firesteel.prompts.template import encode_prompt
from firesteel.recipe import load_recipe
from firesteel.responses.generate import Answer, Ask, Sampling
from firesteel.responses.generator import Generator
from firesteel.stages.line import Line
from firesteel.stages.prompts import spread

ARMS = {"blocks": "auto", "blocks_float32": "float32", "padded": "float32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a named recipe or a YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the last line")
    a = parser.parse_intermixed_args()
    line = Line(load_recipe(a.recipe, a.overrides), ConsoleScreen())
    target, recipe = line.target, line.recipe
    prompts = spread(load_sources(recipe.prompts, "train").prompts, a.prompts)
    ids = [encode_prompt(target.tokenizer, p.history([]), p.tools, where=p.where) for p in prompts]
    asks = [Ask(str(i), found) for i, found in enumerate(ids) if len(found) <= recipe.prompts.max_tokens]
    sampling = Sampling(recipe.responses.max_new_tokens)
    generators = {name: Generator(target.model, recipe.responses.batch_size, precision) for name, precision in ARMS.items()}
    generators["padded"]._flat = False
    paces: dict[str, list[float]] = {name: [] for name in ARMS}
    texts: dict[str, list[Answer]] = {}
    for turn in range(a.turns):
        for name in ARMS if turn % 2 == 0 else reversed(ARMS):
            generators[name].answers(asks, Sampling(1), target.spec.eos_ids)  # weights are packed and room is made when first wanted
            started = time.perf_counter()
            texts[name] = generators[name].answers(asks, sampling, target.spec.eos_ids)
            paces[name].append(sum(len(t.token_ids) for t in texts[name]) / (time.perf_counter() - started))
            if not a.json:
                print(f"turn {turn + 1}: {name}: {paces[name][-1]:.0f} tokens/s", flush=True)
    same = {name: sum(x == y for x, y in zip(texts[name], texts["padded"], strict=True)) / len(asks) for name in ("blocks", "blocks_float32")}
    ratios = [x / y for x, y in zip(paces["blocks"], paces["padded"], strict=True)]
    result = {"benchmark": "generate", "ratio": statistics.median(ratios), "ratios": ratios, "tokens_per_second": paces, "same_answers": same}
    result |= {"prompts": len(asks), "prompt_tokens": sum(len(x.token_ids) for x in asks), "answer_tokens": sum(len(t.token_ids) for t in texts["blocks"])}
    result |= {"recipe": recipe.model_dump(), "threads": torch.get_num_threads(), "load_average": os.getloadavg()}
    result |= {"versions": package_versions(), "machine": machine_facts(accelerator=None).model_dump()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
