"""Preflight: is everything there, and what will it cost? Spends nothing but a few seconds."""

from __future__ import annotations

import math
import time

import torch

from firesteel.decoding.decode import decode_plain
from firesteel.kernels.memory import free_memory
from firesteel.prompts.template import template_facts
from firesteel.prompts.trial import try_template
from firesteel.responses.generate import Ask, Sampling
from firesteel.responses.generator import Generator
from firesteel.stages.configure import configure, preflight
from firesteel.stages.evaluate import per_domain
from firesteel.stages.extra import read_extra
from firesteel.stages.forecast import Forecast, check_most, forecast, free_disk
from firesteel.stages.line import Line
from firesteel.stages.measure import step_seconds
from firesteel.stages.runtime import session_length
from firesteel.stages.states import check_servers
from firesteel.stages.stream import last_batch

_STEPS = 8  # tokens that a trial answer goes on
_TRIALS = 2  # training steps that are timed
_TOKENS, _ANCHORS = 2048, 512  # of a trial step, at most


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
    ahead = forecast(line)
    for text in [*ahead.train.dropped.lines(), *ahead.held_out.dropped.lines()]:
        say(f"prompts dropped: {text}")
    synthetic = f", {ahead.synthetic} to synthesise" if ahead.synthetic else ""
    say(f"prompts: {len(ahead.train.prompts)} for training, {len(ahead.held_out.prompts)} held out{synthetic}")
    _say_states(line, ahead)
    check_most(line, ahead)
    tokens, answers = ahead.tokens, ahead.answers
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
    _say_training(line, list(drafters), ahead)
    if recipe.target.engine == "local":
        _say_evaluation(line, len(drafters) + len(recipe.evaluate.checkpoints), ahead)
    say("check: ready; start with `firesteel run " + recipe.name + "`")


def _say_states(line: Line, ahead: Forecast) -> None:
    """What the states take, where they are kept."""
    hidden, (free, _) = line.recipe.hidden, free_disk(line.folder)
    size = f"hidden states: at most {ahead.tokens} tokens, {ahead.nbytes / 1e9:.2f} GB as {hidden.codec}"
    if hidden.store == "disk":
        line.screen.say(f"{size} ({free / 1e9:.1f} GB free)")
    elif hidden.store == "memory":
        room = free_memory()
        line.screen.say(f"{size}, in the memory of each process" + ("" if room is None else f" ({room / 1e9:.1f} GB free)"))
        if room is not None and ahead.nbytes > room:
            line.screen.warn("hidden.store=memory: the states may not fit; hidden.store=disk or stream, or hidden.codec=fp8, need less memory")
    else:
        line.screen.say(f"{size}, made while training runs and not kept")


def _say_training(line: Line, drafters: list[str], ahead: Forecast) -> None:
    """The time of training, drafter by drafter: of steps where they are counted, from a few on made-up states; and the clock's limit."""
    train, say = line.recipe.train, line.screen.say
    batches = last_batch(train, max(1, math.ceil(ahead.tokens / train.batch_tokens)))
    for name in drafters if batches is not None else ():
        assert batches is not None, "just asked"
        steps = batches // train.accumulate
        each, update = _step(line, name, ahead)
        seconds = train.accumulate * each + update
        say(f"training {name}: about {steps * seconds / 60:.1f} min for {steps} steps of {seconds:.3f} s, one process on this machine; validations come on top")
    if train.max_minutes is not None:
        arms = len(drafters)
        say(f"training: at most {train.max_minutes * arms:g} min ({arms} drafter{'s' if arms > 1 else ''})")


def _step(line: Line, algorithm: str, ahead: Forecast) -> tuple[float, float]:
    """Seconds of a batch's passes, and of what follows once a step; a large batch is reckoned from a smaller one."""
    train, (config, _) = line.recipe.train, configure(line, algorithm)
    share = min(1.0, _TOKENS / train.batch_tokens, _ANCHORS / train.anchors)
    mean = ahead.tokens // max(1, ahead.documents)
    tokens = int(share * train.batch_tokens)
    length = min(tokens, max(mean, 2 * config.block_size))
    whole, update = step_seconds(
        line.recipe,
        config,
        line.layer_ids,
        line.target.head,
        tokens=tokens - tokens % length,
        length=length,
        anchors=max(1, int(share * train.anchors)),
        steps=_TRIALS,
        normalised=line.recipe.target.engine == "local",
    )
    return (whole - update) * train.batch_tokens / (tokens - tokens % length), update


def _say_evaluation(line: Line, arms: int, ahead: Forecast) -> None:
    """Proof and evaluation decode one answer at a time: an upper bound from plain decoding, which drafting is to undercut."""
    settings, responses = line.recipe.evaluate, line.recipe.responses
    session = line.decoding_session(line.layer_ids, session_length(line))
    ids = torch.randint(line.target.spec.vocab_size, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    spans = [decode_plain(session, ids, max_new_tokens=_STEPS + 1, eos_ids=()).seconds_decode / _STEPS for _ in range(2)]
    chosen = per_domain(ahead.held_out.prompts, settings.prompts_per_domain)
    asked = sum(len(p.slots) for p in chosen) * len(settings.temperatures)
    asked += sum(len(p.slots) for s in settings.extra for p in read_extra(s).prompts)
    timed = min(settings.speed_prompts, len(chosen)) * settings.speed_repeats * (1 + arms)
    tokens = (asked * arms + timed) * settings.max_new_tokens + line.recipe.package.proof_prompts * responses.max_new_tokens
    line.screen.say(
        f"proof and evaluation: up to {tokens * min(spans) / 60:.1f} min: {asked * arms + timed} answers, one at a time, "
        f"at the {1 / min(spans):.0f} tokens/s of plain decoding; drafts that are accepted shorten it"
    )


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
