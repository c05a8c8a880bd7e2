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


def check_room(hidden: Hidden, layers: int, width: int) -> int:
    """Bytes of the samples that one trainer process can have under way from one server: as many of the largest as it asks for at a time.

    Raises:
        RecipeError: a Mooncake store of this recipe cannot hold them, or its buffers not even one.
    """
    one, m = largest_sample(hidden, layers, width), hidden.mooncake
    every = one * hidden.feed.concurrency
    if hidden.transport != "mooncake":
        return every
    document = f"a document of {hidden.max_length} tokens (hidden.max_length) has {_gib(one)} GiB of states"
    if one > m.buffer_gb * 2**30:
        raise RecipeError(
            f"{document}, hidden.mooncake.buffer_gb={m.buffer_gb:g} does not hold it", mend=f"set hidden.mooncake.buffer_gb={_gib(1.1 * one)} at both ends"
        )
    if every > m.segment_gb * 2**30:
        fits = int(m.segment_gb * 2**30 / one)
        raise RecipeError(
            f"{document}, {hidden.feed.concurrency} at a time (hidden.feed.concurrency) {_gib(every)}: hidden.mooncake.segment_gb={m.segment_gb:g} "
            "does not hold them",
            mend=f"set hidden.mooncake.segment_gb={_gib(1.1 * every)}" + (f", or hidden.feed.concurrency={fits}" if fits else ""),
        )
    return every


def _gib(size: float) -> str:
    gib = size / 2**30
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.2g}"
