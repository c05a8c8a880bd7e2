"""What vLLM's process and the trainer say to each other about a sample: the request, the answer, and the bytes.

The client names a fresh handle, the layers, the codec and the positions whose last states it needs, in `kv_transfer_params` of its
request. The connector answers with what it serves, and leaves bytes under the handle: safetensors with a checksum over all.
Imported inside vLLM: no training code here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from firesteel.errors import HiddenStateError
from firesteel.hidden.codec import FORMAT_VERSION, CodecName, checksum, encode_states, verify

FIELD = "firesteel"  # our place in kv_transfer_params, both ways
PROTOCOL = 1
_HANDLE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_AGAIN = "the sample is asked for again; if this goes on, look at the server's log"


@dataclass(frozen=True)
class Wanted:
    """A client's request.

    Attributes:
        handle: name under which the sample is left; never used twice.
        layer_ids: captured layers, as in Transformers' `hidden_states`.
        last: half-open ranges of positions whose last state is needed; ascending, disjoint.
        codec: precision of the states on the way.
    """

    handle: str
    layer_ids: tuple[int, ...]
    last: tuple[tuple[int, int], ...]
    codec: CodecName

    def to_params(self) -> dict[str, Any]:
        """As `kv_transfer_params`."""
        return {FIELD: {"protocol": PROTOCOL, **asdict(self)}}


def read_wanted(params: Mapping[str, Any] | None) -> Wanted | None:
    """A client's request from `kv_transfer_params`; None where it does not want states.

    Raises:
        HiddenStateError: it is not one that this version understands.
    """
    said = (params or {}).get(FIELD)
    if said is None:
        return None
    try:
        if said["protocol"] != PROTOCOL:
            raise HiddenStateError(f"the client speaks protocol {said['protocol']}, this server {PROTOCOL}", mend="use the same Firesteel at both ends")
        wanted = Wanted(
            str(said["handle"]), tuple(int(i) for i in said["layer_ids"]), tuple((int(a), int(b)) for a, b in said["last"]), said.get("codec", "bf16")
        )
    except (KeyError, TypeError, ValueError) as e:
        raise HiddenStateError(f"the request for hidden states is malformed: {e!r}") from None
    if not _HANDLE.fullmatch(wanted.handle):
        raise HiddenStateError(f"{wanted.handle!r} cannot name a sample", mend="names are letters, digits, '-', '_' and '.'")
    if wanted.codec not in get_args(CodecName):
        raise HiddenStateError(f"there is no codec {wanted.codec!r}", mend=f"codecs: {', '.join(get_args(CodecName))}")
    return wanted


def to_ranges(positions: Tensor) -> tuple[tuple[int, int], ...]:
    """Ascending positions `[S]` as half-open ranges."""
    if not len(positions):
        return ()
    values = positions.tolist()
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1] + 1]
    ends = [*starts[1:], len(values)]
    return tuple((values[a], values[b - 1] + 1) for a, b in zip(starts, ends, strict=True))


def from_ranges(ranges: Sequence[tuple[int, int]], length: int) -> Tensor:
    """Ranges as positions `[S]` int64.

    Raises:
        HiddenStateError: they do not lie, ascending and apart, within `length` tokens.
    """
    flat = [x for pair in ranges for x in pair]
    if flat != sorted(flat) or any(a >= b for a, b in ranges) or (flat and not (flat[0] >= 0 and flat[-1] <= length)):
        raise HiddenStateError(f"last states are wanted at {[list(r) for r in ranges[:4]]}, the prompt has {length} tokens")
    return torch.cat([torch.arange(a, b) for a, b in ranges]) if ranges else torch.empty(0, dtype=torch.int64)


def pack(
    handle: str, token_ids: Tensor, aux: Tensor, last: Tensor, last_positions: Tensor, *, layer_ids: Sequence[int], codec: CodecName, target: str
) -> bytes:
    """A sample as bytes: `token_ids [T]`, `aux [T, m, d]`, `last [S, d]` at `last_positions [S]`; `target` names the weights.

    Raises:
        HiddenStateError: a state is not finite, or too large for the codec.
    """
    tensors = {"token_ids": token_ids.to(torch.int64), "last_positions": last_positions.to(torch.int64)}
    for name, states in (("aux", aux), ("last", last)):
        try:
            payload, scale = encode_states(states, codec)
        except HiddenStateError as e:
            raise HiddenStateError(f"{name}: {e.message}", mend=e.mend) from None
        tensors[name] = payload
        if scale is not None:
            tensors[f"{name}_scale"] = scale
    header = {"format_version": str(FORMAT_VERSION), "key": handle, "codec": codec, "layer_ids": json.dumps(list(layer_ids)), "target": target}
    header["checksum"] = checksum(tensors, header)
    return save(tensors, metadata=header)


def unpack(data: bytes, handle: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The inverse of `pack`: its tensors, payloads as on the way, and its header, checked bit for bit.

    Raises:
        HiddenStateError: the bytes are not whole, or belong to another handle.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
        tensors = load(data)
    except (SafetensorError, ValueError, AttributeError, RuntimeError) as e:
        raise HiddenStateError(f"sample {handle} arrived damaged: {e}", mend=_AGAIN) from None
    verify(tensors, header, f"sample {handle}")
    if header["key"] != handle:
        raise HiddenStateError(f"sample {handle} holds the states of {header['key']}", mend=_AGAIN)
    # In memory of their own: as views into the bytes they would be aligned by chance, and MKL promises the same bits for equally aligned numbers only.
    return {name: t.clone() for name, t in tensors.items()}, header
