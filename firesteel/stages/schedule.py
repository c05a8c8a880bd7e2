"""Schedule: the costs of a step on this machine, measured once and kept, and the policy that chooses draft lengths by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from firesteel.decoding.adaptive import Scheduler
from firesteel.decoding.profile import Profile, ProfileKey, measure_profile, stored_profile
from firesteel.evaluation.machine import machine_facts
from firesteel.stages.line import Line
from firesteel.stages.runtime import Runtime

_REPEATS = 7
# Acceptance assumed of a drafter whose checkpoint promises nothing; the first rounds correct it.
_UNKNOWN_RATE = 0.6


def make_scheduler(line: Line, runtime: Runtime, prompt_ids: Sequence[int]) -> Scheduler:
    """DSpark's scheduler by this machine's costs; until rounds are seen it expects the acceptance that the checkpoint promises."""
    promise = None if runtime.contract is None else runtime.contract.promise
    rate = _UNKNOWN_RATE if promise is None else rate_of_length(promise.acceptance_length, promise.draft_length)
    return Scheduler(step_profile(line, runtime, prompt_ids), prior=[rate])


def step_profile(line: Line, runtime: Runtime, prompt_ids: Sequence[int]) -> Profile:
    """The profile of this machine, target and drafter behind a context about as long as the prompt; kept in `target.cache_dir`."""
    spec, accelerator = line.target.spec, torch.cuda.get_device_name() if line.target.device.type == "cuda" else None
    # Attention's cost grows slowly with the context: lengths within a factor of two share a profile.
    context = 1 << (len(prompt_ids) - 1).bit_length()
    machine = _text(machine_facts(accelerator=accelerator).model_dump()) + f", {torch.get_num_threads()} threads"
    shape = f"1 request, up to {context} tokens of context, {runtime.config.algorithm} {_text(asdict(runtime.config))}"
    key = ProfileKey(machine, f"{spec.fingerprint} {line.recipe.target.dtype}", runtime.target.engine_name, shape)

    def measure() -> Profile:
        line.screen.say("measuring what steps cost on this machine (once)")
        found = measure_profile(runtime.target, runtime.session, prompt_ids, draft_tokens=runtime.num_drafts, repeats=_REPEATS)
        line.screen.say(f"profile: {found.describe()}")
        return found

    return stored_profile(Path(line.recipe.target.cache_dir).expanduser() / "profiles", key, measure)


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
