"""What work costs: FLOP, bytes and seconds, by formula. Each function says what it counts; sizes are counts, rates are a second's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from firesteel import recipe as recipes
from firesteel.cluster.hardware import Hardware
from firesteel.cluster.shapes import DrafterShape, TargetShape

# vLLM's default of --max-num-batched-tokens for a server on an accelerator: what one forward pass takes at most.
_PREFILL_TOKENS = 8192
_LOSS_ROWS = 128  # slots of the fused loss in flight
_STATE = {"bf16": 2.0, "fp8": 1.0, "fp32": 4.0}


@dataclass(frozen=True)
class Rates:
    """Tokens a second of one server, of the link into one training node, and of one training node; seconds of a step of one trainer process."""

    server: float
    link: float
    trainer_node: float
    step: float


@dataclass(frozen=True)
class Memory:
    """Bytes that one accelerator needs, by what they are for, beside what it has for them."""

    parts: dict[str, float]
    room: float

    @property
    def needed(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.room


def state_bytes(target: TargetShape, captured: int, codec: str, supervised: float = 1.0) -> float:
    """Bytes of a token's hidden states on their way: the captured layers, and of the supervised share the last one; fp8 has a float32 scale a layer."""
    per_layer = target.hidden * _STATE[codec] + (4.0 if codec == "fp8" else 0.0)
    return (captured + supervised) * per_layer


def prefill_flops(target: TargetShape, length: int) -> float:
    """FLOP of a token in a document of `length`: two a parameter it meets, and attention over the half of the document that it sees on average."""
    return 2.0 * target.active + target.attention_layers * target.attention_flops * length / 2


def normaliser_flops(target: TargetShape) -> float:
    """FLOP of the LM head at a position, which the local engine computes for the normaliser."""
    return 2.0 * target.vocab * target.hidden


def local_rate(target: TargetShape, hw: Hardware, length: int, batch: int) -> float:
    """Tokens a second that the local engine captures: the layers, and at every position the LM head in float32 for the normaliser."""
    head = normaliser_flops(target) / (hw.peak("fp32") * hw.efficiency.head)
    return 1 / (1 / server_rate(target, hw, 1, length, max(1, batch // length)) + head)


def server_rate(target: TargetShape, hw: Hardware, accelerators: int, length: int, concurrency: int, *, spans: int = 1) -> float:
    """Tokens a second that a server reads.

    A forward pass takes the longer of its products and of reading the weights, and then its sums over the accelerators.

    Args:
        length: tokens of a document.
        concurrency: documents under way, which fill a forward pass.
        spans: nodes of the server; with several, sums also cross the network.
    """
    batch = min(_PREFILL_TOKENS, length * concurrency)
    share = hw.efficiency.prefill_experts if target.experts else hw.efficiency.prefill_dense
    products = batch * prefill_flops(target, length) / (accelerators * hw.peak(target.precision) * share)
    # Of a mixture every expert is met by some token of a large batch.
    reading = target.weight_bytes / (accelerators * hw.bandwidth * hw.efficiency.bandwidth)
    seconds = max(products, reading)
    if accelerators > 1:
        # Two sums a layer over all accelerators, two bytes a value; a ring moves 2 (n - 1) / n of it.
        summed = batch * target.layers * 2 * target.hidden * 2.0
        seconds += summed * 2 * (accelerators - 1) / accelerators / (hw.peer * hw.efficiency.bandwidth)
        if spans > 1:
            seconds += summed * 2 * (spans - 1) / spans / (hw.network * hw.efficiency.network)
    return batch / seconds


def link_rate(hw: Hardware, per_token: float) -> float:
    """Tokens a second whose states a node's network takes in."""
    return hw.network * hw.efficiency.network / per_token


def step_flops(d: DrafterShape, tokens: int, anchors: int, length: int) -> float:
    """FLOP of the forward and backward pass of a batch.

    A trained product costs 2 forward, 2 for its input and 2 for its weights; `fc` has no gradient to its input; the frozen head 2 forward and 2 for
    the rows, and 2 once more for the teacher at each unique position, of which there is at most one a token.

    Args:
        tokens: of the batch.
        anchors: blocks that are drawn; a batch has at most one a token.
        length: of a document, which bounds what a slot attends to.
    """
    slots = float(min(anchors, tokens) * d.block)
    unique = min(slots, float(tokens))
    seen = min(length / 2, math.inf if d.window is None else d.window) + d.block
    body = 6.0 * slots * d.slot + 6.0 * (slots + tokens) * d.shared + 4.0 * tokens * d.context
    attention = 3 * 4.0 * slots * d.layers * d.attention_width * seen
    head = 4.0 * slots * d.head + 2.0 * unique * d.head + 6.0 * slots * d.vocab * d.vocab_rank
    return body + attention + head


def update_bytes(d: DrafterShape) -> float:
    """Bytes that an optimizer step moves: AdamW reads and writes weight and two moments and reads the gradient (28 a parameter)."""
    return 28.0 * d.trained


def muon_flops(d: DrafterShape) -> float:
    """FLOP of Muon's three Newton-Schulz iterations: at most 18 times the smaller side a parameter, counted as if that were the hidden size."""
    return 18.0 * (d.slot + d.shared + d.context) * d.hidden


def update_seconds(d: DrafterShape, train: recipes.Train, hw: Hardware, processes: int, nodes: int) -> float:
    """Seconds of the optimizer, and of the sum of gradients over processes, once a step; nothing of it is overlapped or shared."""
    seconds = update_bytes(d) / (hw.bandwidth * hw.efficiency.bandwidth)
    if train.optimizer == "muon":
        seconds += muon_flops(d) / (hw.peak(train_precision(train, hw)) * hw.efficiency.muon)
    ring = 4.0 * d.trained * 2 * (processes - 1) / processes
    rate = hw.network * hw.efficiency.network if nodes > 1 else hw.peer * hw.efficiency.bandwidth
    return seconds + (ring / rate if processes > 1 else 0.0)


def train_precision(train: recipes.Train, hw: Hardware) -> str:
    """Of the products of a training step, Muon's iterations among them: bf16 unless the recipe says float32, or the hardware gains nothing by it."""
    return "fp32" if train.precision == "float32" or hw.peak("bf16") <= hw.peak("fp32") else "bf16"


def step_seconds(d: DrafterShape, train: recipes.Train, hw: Hardware, length: int, *, processes: int, nodes: int) -> float:
    """Seconds of one optimizer step: `train.accumulate` batches of each process, or of each `train.context_ranks` processes that share one."""
    rate = hw.peak(train_precision(train, hw)) * hw.efficiency.training
    flops = train.accumulate * step_flops(d, train.batch_tokens, train.anchors, length) / train.context_ranks
    return flops / rate + update_seconds(d, train, hw, processes, nodes)


def server_memory(target: TargetShape, hw: Hardware, accelerators: int, length: int, concurrency: int) -> Memory:
    """Of one accelerator of a server: its part of the weights, cache for the documents under way, and a forward pass."""
    batch = min(_PREFILL_TOKENS, length * concurrency)
    parts = {
        "weights": target.weight_bytes / accelerators,
        "cache": target.cache_bytes * length * concurrency / accelerators,
        # A forward pass holds a few streams of hidden states and an MLP's inner ones: about eight times the hidden size.
        "forward pass": batch * target.hidden * 8 * 2.0,
    }
    return Memory(parts, hw.memory * hw.efficiency.memory)


def fewest_accelerators(target: TargetShape, hw: Hardware, length: int, concurrency: int) -> int | None:
    """The smallest power of two of accelerators whose memory holds a server; None: not even 1,024 do."""
    return next((n for n in (2**k for k in range(11)) if server_memory(target, hw, n, length, concurrency).fits), None)


def shards(d: DrafterShape, train: recipes.Train, hw: Hardware, processes: int) -> int:
    """Processes that divide the drafter's state: all with `train.parallel` fsdp, or with auto where it would fill a quarter of a rank's memory."""
    large = train.parallel == "auto" and _state(d, train) > hw.memory / 4
    return processes if train.parallel == "fsdp" or large else 1


def _state(d: DrafterShape, train: recipes.Train) -> float:
    return d.trained * (16.0 if train.optimizer == "adamw" else 12.0)


def trainer_memory(target: TargetShape, d: DrafterShape, train: recipes.Train, hw: Hardware, dtype: str, processes: int = 1) -> Memory:
    """Of one trainer process: float32 weights, gradients and moments (or its shard of them), the target's frozen tables, a batch."""
    slots = float(min(train.anchors, train.batch_tokens) * d.block)
    frozen = 2 * d.head * (4.0 if dtype == "float32" else 2.0)
    per_slot = d.layers * (6 * d.hidden + 4 * d.attention_width) + 3 * (d.slot / max(1, d.hidden))
    parts = {
        "drafter and optimizer": _state(d, train) / shards(d, train, hw, processes),
        "embedding and head": frozen,
        "states of the batch": train.batch_tokens * (d.captured + 1) * target.hidden * 4.0,
        "activations": slots * per_slot * 4.0,
        "loss": (3 * _LOSS_ROWS + 2 * d.block) * d.vocab * 4.0,
    }
    return Memory(parts, hw.memory * hw.efficiency.memory)
