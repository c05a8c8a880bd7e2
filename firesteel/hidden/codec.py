"""How captured states become bytes: bf16, fp32, or fp8 with a scale per token and layer; and a checksum over all of it.

The norm of the residual stream grows by orders of magnitude from the first to the last layer, so one fp8 scale for all
layers would flush the small ones to zero. Here each token has its own scale in each layer: amax / 448, the largest
number of float8_e4m3fn.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from firesteel.errors import HiddenStateError
from firesteel.hidden.sample import HiddenSample

CodecName = Literal["bf16", "fp32", "fp8"]
FORMAT_VERSION = 1
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
_PAYLOAD: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
RELATIVE_ERROR: dict[str, float] = {"bf16": 2.0**-9, "fp32": 0.0, "fp8": 2.0**-4}  # the most that rounding takes of a normal number
_CHUNK = 1 << 17  # numbers
_MEND = "the stage `extract` makes states anew: firesteel extract RECIPE"
_FIELDS = ("format_version", "key", "codec", "layer_ids", "target", "checksum")


def encode_states(states: Tensor, codec: CodecName) -> tuple[Tensor, Tensor | None]:
    """`[..., d]` states of any floating dtype and device -> payload `[..., d]` on the CPU and, for fp8, float32 scales `[...]`.

    Raises:
        HiddenStateError: a state is not finite, or too large for the codec.
    """
    states = states.detach()
    if codec == "fp8":
        return _encode_fp8(states)
    # Both ends of the range tell of all between them, NaN included, in one pass that writes nothing.
    ends = torch.stack(torch.aminmax(states)) if states.numel() else states.new_zeros(2)
    _check_finite(ends)
    if not bool(torch.isfinite(ends.to(_PAYLOAD[codec])).all()):
        raise HiddenStateError(f"states exceed the range of {codec}", mend="set hidden.codec=fp32")
    return states.to("cpu", _PAYLOAD[codec]).contiguous(), None


def _encode_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    states = states.to("cpu").contiguous()
    reach = torch.maximum(states.amax(-1), -states.amin(-1)).float()
    _check_finite(reach)
    # The floor keeps an all-zero token at zero (0 / tiny * tiny) and the scale a normal number for tiny ones.
    scale = (reach / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    payload = torch.empty(states.shape, dtype=torch.float8_e4m3fn)
    width = states.shape[-1]
    rows, out, scales = states.view(-1, width), payload.view(-1, width), scale.view(-1)
    # A few rows at a time, in one buffer that stays in the processor's cache: fresh memory for all would take longer than the arithmetic.
    count = max(1, _CHUNK // width)
    buffer = torch.empty(min(count, len(rows)), width)
    for begin in range(0, len(rows), count):
        part = buffer[: len(rows[begin : begin + count])]
        part.copy_(rows[begin : begin + count]).div_(scales[begin : begin + count, None])
        # float8_e4m3fn has no infinity: beyond 448 the cast gives NaN, and reach / scale may round up past it.
        out[begin : begin + count] = part.clamp_(-FP8_MAX, FP8_MAX)
    return payload, scale


def _check_finite(extremes: Tensor) -> None:
    if not bool(torch.isfinite(extremes).all()):
        raise HiddenStateError("states are not finite", mend="look at the target's precision: target.dtype=float32 has the widest range")


def decode_states(payload: Tensor, scale: Tensor | None) -> Tensor:
    """The inverse of `encode_states`: bf16 and fp32 as stored (no copy), fp8 as float32 `[..., d]`."""
    return payload if scale is None else payload.float().mul_(scale[..., None])


def encode_sample(sample: HiddenSample, codec: CodecName) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A sample as named CPU tensors and a string-valued header that carries their checksum.

    Tensors: `token_ids [T]`, `loss_mask [T]`, `aux [T, m, d]`, `last [S, d]`, `last_positions [S]`, with fp8 also
    `aux_scale [T, m]` and `last_scale [S]`, and `last_lognorm [S]` where the engine gave it.

    Raises:
        HiddenStateError: a state or normaliser is not finite, or too large for the codec.
    """
    tensors = {
        "token_ids": sample.token_ids.to("cpu", torch.int64).contiguous(),
        "loss_mask": sample.loss_mask.to("cpu", torch.bool).contiguous(),
        "last_positions": sample.last_positions.to("cpu", torch.int64).contiguous(),
    }
    for name, states in (("aux", sample.aux), ("last", sample.last)):
        try:
            payload, scale = encode_states(states, codec)
        except HiddenStateError as e:
            raise HiddenStateError(f"sample {sample.key}, {name}: {e.message}", mend=e.mend) from None
        tensors[name] = payload
        if scale is not None:
            tensors[f"{name}_scale"] = scale
    if sample.last_lognorm is not None:
        if not bool(torch.isfinite(sample.last_lognorm).all()):
            raise HiddenStateError(f"sample {sample.key}: the target's logit normalisers are not finite", mend=_MEND)
        tensors["last_lognorm"] = sample.last_lognorm.to("cpu", torch.float32).contiguous()
    header = {
        "format_version": str(FORMAT_VERSION),
        "key": sample.key,
        "codec": codec,
        "layer_ids": json.dumps(list(sample.layer_ids)),
        "target": sample.target,
    }
    header["checksum"] = checksum(tensors, header)
    return tensors, header


def decode_sample(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> HiddenSample:
    """The inverse of `encode_sample`. The tensors may share memory with the store's: read them, do not write.

    Expects what `verify` has passed, or what never left this process.
    """
    return HiddenSample(
        key=header["key"],
        token_ids=tensors["token_ids"],
        loss_mask=tensors["loss_mask"],
        aux=decode_states(tensors["aux"], tensors.get("aux_scale")),
        last=decode_states(tensors["last"], tensors.get("last_scale")),
        last_positions=tensors["last_positions"],
        layer_ids=tuple(json.loads(header["layer_ids"])),
        target=header["target"],
        last_lognorm=tensors.get("last_lognorm"),
    )


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """`crc32:` and eight digits: over the header and over every tensor's name, dtype, shape and bytes, independent of their order.

    It is to find damage, not forgery, at the rate of the wire and without a package that a server would have to install: CRC-32 finds
    every run of up to 32 flipped bits and all but one in four billion other changes.
    """
    sum_ = 0
    for part in _summed(tensors, header):
        sum_ = zlib.crc32(part, sum_)
    return f"crc32:{sum_:08x}"


def _blake2b(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """The checksum of samples stored before there was `crc32:`."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _summed(tensors, header):
        digest.update(part)
    return digest.hexdigest()


def _summed(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    yield json.dumps({k: v for k, v in header.items() if k != "checksum"}, sort_keys=True).encode()
    for name in sorted(tensors):
        tensor = tensors[name]
        yield f"{name} {tensor.dtype} {list(tensor.shape)};".encode()
        yield tensor.contiguous().flatten().view(torch.uint8).numpy().data


def verify(tensors: Mapping[str, Tensor], header: Mapping[str, str], where: str) -> None:
    """Refuse tensors that are not, bit for bit, what was encoded; `where` names the file.

    Raises:
        HiddenStateError: the header is incomplete, of another format version, or its checksum differs.
    """
    missing = [name for name in _FIELDS if name not in header]
    if missing:
        raise HiddenStateError(f"{where} is not a file of hidden states: its header lacks {', '.join(missing)}", mend=_MEND)
    found = checksum(tensors, header) if ":" in header["checksum"] else _blake2b(tensors, header)
    if found != header["checksum"]:
        raise HiddenStateError(f"{where} is corrupt: its checksum is {found}, its header says {header['checksum']}", mend=_MEND)
    # After the checksum, so that a damaged version number is reported as damage.
    if header["format_version"] != str(FORMAT_VERSION):
        raise HiddenStateError(f"{where} has format version {header['format_version']}, this Firesteel reads {FORMAT_VERSION}", mend=_MEND)


def state_bytes(vectors: int, d: int, codec: CodecName) -> int:
    """Bytes of this many states of width d, scales included."""
    return vectors * (d * _PAYLOAD[codec].itemsize + (4 if codec == "fp8" else 0))
