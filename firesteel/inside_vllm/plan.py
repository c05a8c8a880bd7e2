"""The scheduler's side: which requests want states, when their prefill ends, and what their clients are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firesteel.errors import FiresteelError, HiddenStateError
from firesteel.hidden.wire import FIELD, PROTOCOL, Wanted, from_ranges, read_wanted

LAYER = "cache_only_layers"  # the name that vLLM gives the layer that keeps states


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
    saved: bool = False


class Planner:
    """Follows requests from their first step to their end.

    Args:
        layer_ids: captured layers, in the order of the cache's columns.
        num_layers: id of the last layer's output, which must be among them.
        block_size: positions of a block.
        max_length: positions that the server takes.
        weights: digest of the served weights; None where they cannot be read.
        model: name of the served model, for messages.
    """

    def __init__(self, layer_ids: Sequence[int], num_layers: int, block_size: int, max_length: int, weights: str | None, model: str) -> None:
        self.layer_ids, self.num_layers, self.block_size, self.max_length = tuple(layer_ids), num_layers, block_size, max_length
        self.weights, self.model = weights, model
        self._requests: dict[str, _Prefill] = {}
        self._stale: set[int] = set()  # blocks with positions that vLLM computed without writing their states

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
        self._follow(computed, scheduled, blocks)
        saves = []
        for name, count in scheduled.items():
            request = self._requests.get(name)
            if request is None or request.wanted is None or request.saved or computed.get(name, 0) + count < len(request.prompt):
                continue
            found = blocks(name)
            error = None
            if self._stale.intersection(found[: -(-len(request.prompt) // self.block_size)]):
                error = (
                    f"vLLM captured no states of some of these tokens: it does not in a step that reaches its longest length of {self.max_length}. "
                    "If this goes on, its prefix cache keeps them: serve with --no-enable-prefix-caching"
                )
            saves.append(Save(request.wanted, request.prompt, [] if error else found, error))
            request.saved = True
        return saves

    def _follow(self, computed: Mapping[str, int], scheduled: Mapping[str, int], blocks: Callable[[str], Sequence[int]]) -> None:
        """Which blocks have states. vLLM's first model runner writes none at all in a step in which some request comes within a token of the longest
        length, but the prefix cache keeps the blocks of that step like any other, and gives them to later requests as computed."""
        skipped = any(computed.get(r, 0) + n + 1 > self.max_length for r, n in scheduled.items())
        if not skipped and not self._stale:
            return
        size = self.block_size
        for name, count in scheduled.items():
            first, end = computed.get(name, 0), -(-(computed.get(name, 0) + count) // size)
            if skipped:
                self._stale.update(blocks(name)[first // size : end])
            else:  # written from its first position on, a block is as good as new
                self._stale.difference_update(blocks(name)[-(-first // size) : end])

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


def find_group(kv_cache_config: Any) -> tuple[int, int]:
    """Of vLLM's cache groups the one with the layer that keeps states, and its block size (hybrid targets have several groups, of several sizes).

    Raises:
        FiresteelError: there is none.
    """
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        if any(LAYER in name for name in group.layer_names):
            return i, group.kv_cache_spec.block_size
    names = [group.layer_names[:2] for group in kv_cache_config.kv_cache_groups]
    raise FiresteelError(f"none of vLLM's cache groups keeps hidden states: {names}")
