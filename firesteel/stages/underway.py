"""What samples take between servers and trainers: of the largest one, and of all that are under way at a time."""

from __future__ import annotations

from firesteel.errors import RecipeError
from firesteel.hidden.stores import predict_bytes
from firesteel.recipe import Hidden


def largest_sample(hidden: Hidden, layers: int, width: int) -> int:
    """Bytes that the longest document takes on its way: all of its positions in `layers` captured layers and the last one.

    Args:
        width: of the target's residual stream.
    """
    return predict_bytes(hidden.max_length, hidden.max_length, layers, width, hidden.codec)


def check_buffer(hidden: Hidden, layers: int, width: int) -> int:
    """`largest_sample`, which Mooncake's buffers must hold at both ends.

    Raises:
        RecipeError: they do not.
    """
    one = largest_sample(hidden, layers, width)
    if hidden.transport == "mooncake" and one > hidden.mooncake.buffer_gb * 2**30:
        raise RecipeError(
            f"{_document(hidden, one)}, hidden.mooncake.buffer_gb={hidden.mooncake.buffer_gb:g} does not hold it",
            mend=f"set hidden.mooncake.buffer_gb={_gib(1.1 * one)} at both ends",
        )
    return one


def check_room(hidden: Hidden, layers: int, width: int) -> int:
    """Bytes of the samples that one trainer process can have under way from one server: as many of the largest as it asks for at a time.

    Raises:
        RecipeError: the segment that a server of this recipe lends cannot hold them, or the buffers not even one.
    """
    one, segment = check_buffer(hidden, layers, width), hidden.mooncake.segment_gb
    every = one * hidden.feed.concurrency
    if hidden.transport == "mooncake" and every > segment * 2**30:
        fits = int(segment * 2**30 / one)
        raise RecipeError(
            f"{_document(hidden, one)}, {hidden.feed.concurrency} at a time (hidden.feed.concurrency) {_gib(every)}: "
            f"hidden.mooncake.segment_gb={segment:g} does not hold them",
            mend=f"set hidden.mooncake.segment_gb={_gib(1.1 * every)}" + (f", or hidden.feed.concurrency={fits}" if fits else ""),
        )
    return every


def _document(hidden: Hidden, size: int) -> str:
    return f"a document of {hidden.max_length} tokens (hidden.max_length) has {_gib(size)} GiB of states"


def _gib(size: float) -> str:
    gib = size / 2**30
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.2g}"
