"""Schedule: the costs of a step on this machine, measured once and kept, and the policy that chooses draft lengths by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from firesteel.decoding.adaptive import AsynchronousScheduler, Scheduler
from firesteel.decoding.batched.costs import CONTEXT, measure_batch_profile
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.profile import Profile, ProfileKey, measure_profile, stored_profile
from firesteel.drafters.config import DraftConfig
from firesteel.evaluation.machine import machine_facts
from firesteel.kernels.paged import is_compiled
from firesteel.package.contract import Contract
from firesteel.stages.line import Line
from firesteel.stages.runtime import Parts, Runtime
from firesteel.target.paged import PagedTarget

_REPEATS = 7
# Acceptance assumed of a drafter whose checkpoint promises nothing; the first rounds correct it.
_UNKNOWN_RATE = 0.6


def make_scheduler(line: Line, runtime: Runtime, prompt_ids: Sequence[int]) -> Scheduler:
    """DSpark's scheduler by this machine's costs; until rounds are seen it expects the acceptance that the checkpoint promises."""
    return Scheduler(step_profile(line, runtime, prompt_ids), prior=[_promised_rate(runtime.contract)])


def batch_scheduler(line: Line, engine: Engine, parts: Parts, *, asynchronous: bool) -> Scheduler:
    """The same for the batched engine."""
    kind = AsynchronousScheduler if asynchronous else Scheduler
    return kind(batch_profile(line, engine, parts), prior=[_promised_rate(parts.contract)])


def step_profile(line: Line, runtime: Runtime, prompt_ids: Sequence[int]) -> Profile:
    """The profile of this machine, target and drafter behind a context about as long as the prompt; kept in `target.cache_dir`."""
    # Attention's cost grows slowly with the context: lengths within a factor of two share a profile.
    context = 1 << (len(prompt_ids) - 1).bit_length()
    shape = f"1 request, up to {context} tokens of context, {_drafter_text(runtime.config)}"
    measure = partial(measure_profile, runtime.target, runtime.session, prompt_ids, draft_tokens=runtime.num_drafts, repeats=_REPEATS)
    return _stored(line, runtime.target.engine_name, shape, measure, torch.get_num_threads())


def batch_profile(line: Line, engine: Engine, parts: Parts) -> Profile:
    """The profile of the batched engine's steps on this machine; kept in `target.cache_dir`."""
    requests, tokens = engine.max_requests, engine.draft_tokens
    target, threads = engine.target, torch.get_num_threads()
    shape = f"{requests} requests, {CONTEXT} tokens of context, drafts of {tokens}, {_drafter_text(parts.config)}"
    if isinstance(target, PagedTarget):
        # How many threads there are at the moment depends on the size of its last step.
        threads = target.threads
        shape += f", {'compiled' if is_compiled() else 'plain'} attention, a thread left over in steps of up to {target.spare} tokens"
    name = f"batched {type(engine.target).__name__} {type(engine.drafter).__name__}"
    vocabulary = line.target.spec.vocab_size
    measure = partial(
        measure_batch_profile,
        target,
        engine.drafter,
        engine.pool,
        requests=requests,
        draft_tokens=tokens,
        vocab_size=vocabulary,
        repeats=_REPEATS,
    )
    return _stored(line, name, shape, measure, threads)


def _stored(line: Line, engine: str, shape: str, measure: Callable[[], Profile], threads: int) -> Profile:
    spec, accelerator = line.target.spec, torch.cuda.get_device_name() if line.target.device.type == "cuda" else None
    machine = _text(machine_facts(accelerator=accelerator).model_dump()) + f", {threads} threads"
    key = ProfileKey(machine, f"{spec.fingerprint} {line.recipe.target.dtype}", engine, shape)

    def tell() -> Profile:
        line.screen.say("measuring what steps cost on this machine (once)")
        found = measure()
        line.screen.say(f"profile: {found.describe()}")
        return found

    return stored_profile(Path(line.recipe.target.cache_dir).expanduser() / "profiles", key, tell)


def _promised_rate(contract: Contract | None) -> float:
    promise = None if contract is None else contract.promise
    return _UNKNOWN_RATE if promise is None else rate_of_length(promise.acceptance_length, promise.draft_length)


def _drafter_text(config: DraftConfig) -> str:
    return f"{config.algorithm} {_text(asdict(config))}"


def rate_of_length(acceptance_length: float, drafts: int) -> float:
    """The rate q at which drafts would stand one after another, if it were the same for all: 1 + q + ... + q^drafts = acceptance length."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(drafts + 1)) < acceptance_length else (low, middle)
    return low


def _text(values: dict[str, object]) -> str:
    """Settings as one line, in a fixed order."""
    return ", ".join(f"{k}={values[k]}" for k in sorted(values))
