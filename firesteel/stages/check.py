"""Preflight: is everything there, and what will it cost? Spends nothing but a few seconds."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from firesteel.errors import ResourceError
from firesteel.hidden.stores import predict_bytes
from firesteel.prompts.sources import load_sources
from firesteel.prompts.template import prompt_tokens, template_facts
from firesteel.prompts.trial import try_template
from firesteel.responses.generate import Ask, Sampling
from firesteel.responses.generator import Generator
from firesteel.stages.configure import preflight
from firesteel.stages.line import Line
from firesteel.stages.states import check_servers

_STEPS = 8  # tokens that a trial answer goes on
_SAMPLE = 64


def run(line: Line) -> None:
    """Check target, template, prompts, layers and disk; predict bytes and time from short probes.

    Raises:
        FiresteelError: of the kind that the run would meet.
    """
    recipe, say = line.recipe, line.screen.say
    target = line.target
    drafters = preflight(line)
    facts = template_facts(target.tokenizer)
    tools = "yes" if facts.tools else "no (prompts with tools are asked without)"
    say(f"chat template: system turns {'yes' if facts.system else 'NO'}, tools {tools}, ends a turn with {facts.end!r}")
    if rewriting := try_template(target.tokenizer, target.spec.eos_ids):
        say(f"chat template: {rewriting}")
    say(f"captured layers: {list(line.layer_ids)} of {target.spec.num_layers}; hidden size {target.spec.hidden_size}, vocabulary {target.spec.vocab_size}")
    train, held_out = (load_sources(recipe.prompts, split) for split in ("train", "eval"))
    extra = sum(s.synthesize or 0 for s in recipe.prompts.sources)
    for text in [*train.dropped.lines(), *held_out.dropped.lines()]:
        say(f"prompts dropped: {text}")
    say(f"prompts: {len(train.prompts)} for training, {len(held_out.prompts)} held out" + (f", {extra} to synthesise" if extra else ""))
    sample = (train.prompts or held_out.prompts)[:_SAMPLE]
    length = sum(prompt_tokens(target.tokenizer, p) for p in sample) / len(sample) if sample else 64.0
    turns = sum(len(p.slots) for p in train.prompts) * recipe.responses.samples + extra
    answers = turns * recipe.responses.max_new_tokens
    tokens = int((len(train.prompts) * recipe.responses.samples + extra) * length + answers)
    size = predict_bytes(tokens, answers, len(line.layer_ids), target.spec.hidden_size, recipe.hidden.codec, max(1, turns))
    where = next(p for p in [line.folder, *line.folder.absolute().parents, Path.cwd()] if p.exists())
    free = shutil.disk_usage(where).free
    say(f"hidden states: at most {tokens} tokens, {size / 1e9:.2f} GB as {recipe.hidden.codec} ({free / 1e9:.1f} GB free)")
    if recipe.hidden.store == "disk" and size > 0.9 * free:
        raise ResourceError(
            f"hidden states would take {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free at {where}",
            mend="set runs_dir=ANOTHER_DISK, hidden.codec=fp8, or fewer prompts",
        )
    if recipe.target.engine == "vllm":
        served = check_servers(line)
        for url, pace in served.items():
            say(f"server {url}: {pace:.0f} tokens/s with states, one document at a time, by {recipe.hidden.transport}")
        say(f"states: up to {tokens / sum(served.values()) / 60:.1f} min")
    if "local" in (recipe.target.engine, recipe.responses.engine):
        prefill, step = _pace(line)
        if recipe.target.engine == "local":
            say(f"forward pass: {prefill:.0f} tokens/s; states: up to {tokens / prefill / 60:.1f} min")
        say(f"answers: up to {answers / step / 60:.1f} min at {step:.0f} tokens/s (those on file cost nothing)")
    for name, count in drafters.items():
        say(f"{name}: {count:,} trainable parameters")
    arms = len(drafters)
    if recipe.train.max_minutes is not None:
        say(f"training: at most {recipe.train.max_minutes * arms:g} min ({arms} drafter{'s' if arms > 1 else ''})")
    say("check: ready; start with `firesteel run " + recipe.name + "`")


def _pace(line: Line) -> tuple[float, float]:
    """Tokens per second of a forward pass, and of answers written `responses.batch_size` at a time."""
    target, recipe = line.target, line.recipe.responses
    ids = torch.randint(target.spec.vocab_size, (1, 256), generator=torch.Generator().manual_seed(0)).to(target.device)
    times = []
    with torch.inference_mode():
        for _ in range(2):
            started = time.perf_counter()
            target.model(ids, use_cache=False, logits_to_keep=1)
            times.append(time.perf_counter() - started)
    generator = Generator(target.model, recipe.batch_size, recipe.precision)
    asks = [Ask(str(i), ids[0, :16].tolist()) for i in range(recipe.batch_size)]
    spans = []
    for tokens in (_STEPS + 1, 1, _STEPS + 1):  # the first also packs weights
        started = time.perf_counter()
        generator.answers(asks, Sampling(tokens), ())
        spans.append(time.perf_counter() - started)
    return ids.numel() / min(times), _STEPS * len(asks) / max(spans[2] - spans[1], spans[2] / (2 * _STEPS))
