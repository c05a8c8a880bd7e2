"""The scheduler's side: which requests want states, when their prefill ends, and what their clients are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firesteel.errors import HiddenStateError
from firesteel.hidden.wire import FIELD, PROTOCOL, Wanted, from_ranges, read_wanted


@dataclass(frozen=True)
class Save:
    """States to hand out at the end of this step.

    Attributes:
        wanted: the client's request.
        token_ids: the prompt.
        blocks: blocks of the hidden-state cache that hold the prompt's states, in order.
        error: why they are not good; then only a marker is left.
    """

    wanted: Wanted
    token_ids: Sequence[int]
    blocks: Sequence[int]
    error: str | None = None


@dataclass
class _Prefill:
    wanted: Wanted | None
    prompt: Sequence[int]
    error: str | None = None
    skipped: bool = False
    saved: bool = False


class Planner:
    """Follows requests from their first step to their end.

    Args:
        layer_ids: captured layers, in the order of the cache's columns.
        num_layers: id of the last layer's output, which must be among them.
        max_length: positions that the server takes.
        weights: digest of the served weights; None where they cannot be read.
        model: name of the served model, for messages.
    """

    def __init__(self, layer_ids: Sequence[int], num_layers: int, max_length: int, weights: str | None, model: str) -> None:
        self.layer_ids, self.num_layers, self.max_length = tuple(layer_ids), num_layers, max_length
        self.weights, self.model = weights, model
        self._requests: dict[str, _Prefill] = {}

    def start(self, request: str, prompt: Sequence[int] | None, params: Mapping[str, Any] | None) -> None:
        """A request is scheduled for the first time; without our field in its parameters it is left alone."""
        try:
            wanted = read_wanted(params)
            if wanted is None:
                return
            self._check(wanted, prompt)
        except HiddenStateError as e:
            self._requests[request] = _Prefill(None, (), e.message)
            return
        self._requests[request] = _Prefill(wanted, prompt or ())

    def step(self, computed: Mapping[str, int], scheduled: Mapping[str, int], blocks: Callable[[str], Sequence[int]]) -> list[Save]:
        """What to save at the end of a step.

        Args:
            computed: tokens whose states were there before it, by request.
            scheduled: tokens that it computes, by request.
            blocks: the cache's blocks of a request.
        """
        # vLLM writes no states at all in a step in which some request comes within a token of the longest length.
        skipped = any(computed.get(r, 0) + n + 1 > self.max_length for r, n in scheduled.items())
        saves = []
        for name, count in scheduled.items():
            request = self._requests.get(name)
            if request is None or request.wanted is None or request.saved:
                continue
            if computed.get(name, 0) == 0:  # its first step, or again after it was preempted
                request.skipped = False
            request.skipped |= skipped
            if computed.get(name, 0) + count >= len(request.prompt):
                error = f"vLLM captured no states in a step that reached its longest length of {self.max_length}" if request.skipped else None
                saves.append(Save(request.wanted, request.prompt, [] if error else blocks(name), error))
                request.saved = True
        return saves

    def finish(self, request: str) -> dict[str, Any] | None:
        """The answer to a request's client, as `kv_transfer_params`; None where it wanted no states."""
        found = self._requests.pop(request, None)
        if found is None:
            return None
        error = found.error if found.saved or found.error else "the request ended before its prefill did"
        answer = {"protocol": PROTOCOL, "layer_ids": list(self.layer_ids), "num_layers": self.num_layers, "weights": self.weights, "model": self.model}
        return {FIELD: {**answer, "error": error, "refused": found.error is not None}}

    def _check(self, wanted: Wanted, prompt: Sequence[int] | None) -> None:
        if prompt is None:
            raise HiddenStateError("a prompt of embeddings has no token ids to send back")
        lacking = [i for i in (*wanted.layer_ids, self.num_layers) if i not in self.layer_ids]
        if lacking:
            raise HiddenStateError(f"layer {lacking[0]} is wanted, the server of {self.model} captures {list(self.layer_ids)}")
        from_ranges(wanted.last, len(prompt))
