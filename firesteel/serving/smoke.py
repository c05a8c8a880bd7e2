"""The smoke check: held-out prompts through a running server; what it accepted against what was measured before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from firesteel.errors import VerificationError
from firesteel.serving.counters import Counters, read_counters

_SLACK = 0.02  # accepted drafts a round that may come where none were measured


@dataclass(frozen=True)
class Expectation:
    """What the drafter is known to reach: an acceptance length at this many drafts a round, greedily, and where it was measured.

    Attributes:
        exact: measured on the very prompts that are sent, with as many drafts a round: then more is as wrong as less.
    """

    acceptance_length: float
    tokens: int
    measured_on: str
    exact: bool = False


@dataclass(frozen=True)
class Smoke:
    """What a check found."""

    prompts: int
    tokens: int
    counters: Counters
    expected: Expectation

    @property
    def acceptance_length(self) -> float:
        return self.counters.acceptance_length

    @property
    def acceptance_within(self) -> float:
        """The least that it can be within the answers: a server counts what it accepted behind their ends as well, and no round in which there was
        room for one token only, and thus nothing to draft."""
        # An answer has a token of its prompt's pass, and of each round those accepted and one more.
        beyond = self.prompts + self.counters.drafts + self.counters.accepted - self.tokens
        return 1 + max(0, self.counters.accepted - max(0, beyond)) / max(1, self.counters.drafts + max(0, -beyond))

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "acceptance_length": self.acceptance_length,
            "expected": vars(self.expected),
            "counters": vars(self.counters),
        }


def smoke_check(url: str, prompts: Sequence[Sequence[int]], expected: Expectation, *, max_new_tokens: int, tolerance: float, timeout: float) -> Smoke:
    """Send prompts one by one, greedily, and compare the server's own counters with the expectation.

    Args:
        prompts: token ids.
        tolerance: largest relative difference of the accepted tokens per round (the acceptance length less the target's own token).

    Raises:
        VerificationError: the server does not answer or count, or accepts less than expected; or more, where the expectation is `exact`.
    """
    with httpx.Client(base_url=url, timeout=timeout, trust_env=False) as client:
        model = _ask(client, "GET", "/v1/models", None)["data"][0]["id"]
        before, tokens = read_counters(url), 0
        for prompt in prompts:
            body = {"model": model, "prompt": list(prompt), "max_tokens": max_new_tokens, "temperature": 0}
            tokens += int(_ask(client, "POST", "/v1/completions", body)["usage"]["completion_tokens"])
    smoke = Smoke(len(prompts), tokens, read_counters(url).since(before), expected)
    _judge(smoke, tolerance)
    return smoke


@dataclass(frozen=True)
class Pace:
    """Tokens per second of the same answers, one at a time: with drafts, and without."""

    drafted: float
    plain: float

    @property
    def ratio(self) -> float:
        return self.drafted / self.plain

    def to_dict(self) -> dict[str, float]:
        return {**vars(self), "ratio": self.ratio}


def time_both(url: str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, timeout: float) -> Pace:
    """Time prompts with the drafter and without it, in alternation, at a server that knows `speculate` (Firesteel's own) and has seen them before.

    Raises:
        VerificationError: the server does not answer.
    """
    spent, written = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    with httpx.Client(base_url=url, timeout=timeout, trust_env=False) as client:
        model = _ask(client, "GET", "/v1/models", None)["data"][0]["id"]

        def write(prompt: Sequence[int], speculate: bool) -> tuple[float, int]:
            body = {"model": model, "prompt": list(prompt), "max_tokens": max_new_tokens, "temperature": 0, "speculate": speculate}
            began = time.perf_counter()
            tokens = int(_ask(client, "POST", "/v1/completions", body)["usage"]["completion_tokens"])
            return time.perf_counter() - began, tokens

        write(prompts[0], False)  # the check has drafted: what only plain steps need is made now
        for number, prompt in enumerate(prompts):
            for speculate in (True, False) if number % 2 == 0 else (False, True):
                seconds, tokens = write(prompt, speculate)
                spent[speculate] += seconds
                written[speculate] += tokens
    return Pace(*(written[how] / spent[how] for how in (True, False)))


def _judge(smoke: Smoke, tolerance: float) -> None:
    counters, expected = smoke.counters, smoke.expected
    if not counters.drafts:
        raise VerificationError(f"the server wrote {smoke.tokens} tokens and counted no round of drafting", mend="look at its log: it serves without drafter")
    if counters.acceptance_length - 1 < (expected.acceptance_length - 1) * (1 - tolerance):
        by_position = ", ".join(f"{n / counters.drafts:.2f}" for n in counters.by_position)
        raise VerificationError(
            f"served, the drafter reaches acceptance length {counters.acceptance_length:.3f} ({counters.drafts} rounds; by position {by_position}), "
            f"but {expected.acceptance_length:.3f} was measured on {expected.measured_on} (serve.tolerance={tolerance:g})",
            mend="the server does not run what was trained: another target, revision or quantisation, other layers, or a limit that DEPLOY.md names",
        )
    if expected.exact and smoke.acceptance_within - 1 > max((expected.acceptance_length - 1) * (1 + tolerance), _SLACK):
        raise VerificationError(
            f"served, the drafter reaches acceptance length {smoke.acceptance_within:.3f} or more ({counters.drafts} rounds), "
            f"but only {expected.acceptance_length:.3f} was measured on {expected.measured_on} (serve.tolerance={tolerance:g})",
            mend="the server does not run what was measured: another drafter or target, or drafts that it accepts without verifying them; "
            "if it is a new one, `firesteel evaluate RECIPE` measures it",
        )


def _ask(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    try:
        answer = client.request(method, path, json=body)
        answer.raise_for_status()
        found = answer.json()
    except httpx.HTTPStatusError as e:
        raise VerificationError(f"the server answers {path} with {e.response.status_code}: {e.response.text[:300]}") from None
    except httpx.TimeoutException:
        raise VerificationError(f"the server has not answered {path} in {client.timeout.read:g} s", mend="raise serve.request_timeout") from None
    except (httpx.HTTPError, ValueError) as e:
        raise VerificationError(f"the server's answer to {path} cannot be read: {e}", mend="look at its log") from None
    assert isinstance(found, dict)
    return found
