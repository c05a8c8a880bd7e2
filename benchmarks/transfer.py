"""Samples through Firesteel's Mooncake exchange beside Mooncake's own put and get of as many bytes, in turn.

A real master, started here, and two real clients of it over TCP in this process: one lends memory and puts, as a server does; the other lends none and
gets, as a trainer does. Three ways take turns with every sample:
    raw       Mooncake's put, get and remove of the bytes
    exchange  Firesteel's: data and marker put, both taken and counted, both removed
    sample    the same with what stands before and behind it: states packed with a checksum, bytes unpacked and the checksum compared
The last line of stdout is one JSON object; `ratio` is the median of raw seconds over the exchange's, the least of all sizes and codecs (1: as fast as
Mooncake alone), `sample_ratio` of raw seconds over the sample's, and `bytes_ratio` the bytes of a sample in fp8 over those in bf16, the largest of all
sizes.

Usage: python benchmarks/transfer.py [--megabytes 10,25,50] [--repeats 15] [--warmup 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from running import MIB, Master, facts
from torch import Tensor

from firesteel.hidden.codec import CodecName
from firesteel.hidden.exchange import MooncakeExchange
from firesteel.hidden.mooncake import MooncakeSettings
from firesteel.hidden.wire import pack, unpack

CAPTURED = 5
CODECS: tuple[CodecName, ...] = ("bf16", "fp8")
_BF16 = 2
WAYS = ("raw", "exchange", "sample")


@dataclass(frozen=True)
class States:
    """A document's made-up states in bfloat16, as a server's are: `aux [T, 5, d]`, and `last [T, d]` at every position."""

    token_ids: Tensor
    aux: Tensor
    last: Tensor

    def pack(self, handle: str, codec: CodecName) -> bytes:
        positions = torch.arange(len(self.token_ids))
        return pack(handle, self.token_ids, self.aux, self.last, positions, layer_ids=range(CAPTURED), codec=codec, target="made-up")


def tokens_of(megabytes: float, width: int) -> int:
    """Tokens of a document whose states have so many megabytes (10^6 bytes) in bf16."""
    return max(1, round(megabytes * 1e6 / ((CAPTURED + 1) * width * _BF16)))


def make_states(tokens: int, width: int) -> States:
    generator = torch.Generator().manual_seed(tokens)
    aux, last = torch.randn(tokens, CAPTURED, width, generator=generator), torch.randn(tokens, width, generator=generator)
    return States(torch.randint(2**15, (tokens,), generator=generator), aux.bfloat16(), last.bfloat16())


class Ends:
    """Two clients of one store: `lender` puts, `reader` gets."""

    def __init__(self, master: str, largest: int) -> None:
        self.lender = MooncakeExchange(MooncakeSettings(master, segment=8 * largest, buffer=2 * largest))
        self.reader = MooncakeExchange(MooncakeSettings(master, buffer=2 * largest))
        self._number = 0

    def close(self) -> None:
        self.reader.close()
        self.lender.close()

    def ways(self, states: States, codec: CodecName) -> dict[str, Callable[[], tuple[float, float]]]:
        """Each way as a function: seconds until it was put, and from there until it was got. Removing is not counted, on neither side."""
        data = states.pack("bytes", codec)
        put, get = self.lender.store._store, self.reader.store._store

        def raw() -> tuple[float, float]:
            name = self._name()
            begin = time.perf_counter()
            code = put.put(name, data)
            middle = time.perf_counter()
            found = get.get(name)
            end = time.perf_counter()
            put.remove(name, True)
            assert code == 0, f"Mooncake's own put and get lost {len(data)} bytes"
            assert len(found) == len(data), f"Mooncake's own put and get lost {len(data)} bytes"
            return middle - begin, end - middle

        def exchange() -> tuple[float, float]:
            name = self._name()
            begin = time.perf_counter()
            self.lender.put(name, data)
            middle = time.perf_counter()
            taken = self.reader.take(name)
            end = time.perf_counter()
            self.reader.remove(name)
            assert taken is not None, "a marker was put"
            assert taken[0].size == len(taken[1]), "the marker tells the size"
            return middle - begin, end - middle

        def sample() -> tuple[float, float]:
            name = self._name()
            begin = time.perf_counter()
            self.lender.put(name, states.pack(name, codec))
            middle = time.perf_counter()
            taken = self.reader.take(name)
            assert taken is not None, "a marker was put"
            unpack(taken[1], name)
            end = time.perf_counter()
            self.reader.remove(name)
            return middle - begin, end - middle

        return {"raw": raw, "exchange": exchange, "sample": sample}

    def _name(self) -> str:
        self._number += 1
        return f"transfer-{self._number}"


def compare(seconds: dict[str, list[tuple[float, float]]], size: int) -> dict[str, Any]:
    """Ratios of one size, turn by turn, and the rates of every way.

    Args:
        seconds: of putting and getting, by way, in turns.
        size: bytes of the sample.
    """

    def ratio(way: str, part: Callable[[tuple[float, float]], float]) -> float:
        return statistics.median(part(raw) / part(ours) for raw, ours in zip(seconds["raw"], seconds[way], strict=True))

    rates = {way: {"put": [size / put for put, _ in rows], "get": [size / get for _, get in rows]} for way, rows in seconds.items()}
    return {
        "bytes": size,
        "ratio": ratio("exchange", sum),
        "put_ratio": ratio("exchange", lambda s: s[0]),
        "get_ratio": ratio("exchange", lambda s: s[1]),
        "sample_ratio": ratio("sample", sum),
        "megabytes_per_second": {way: {part: statistics.median(values) / 1e6 for part, values in parts.items()} for way, parts in rates.items()},
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", default="10,25,50", help="of the samples in bf16, comma-separated")
    parser.add_argument("--width", type=int, default=576, help="of a state")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2, help="turns before them that are not counted")
    a = parser.parse_args()
    sizes = [float(m) for m in a.megabytes.split(",")]
    samples = {m: make_states(tokens_of(m, a.width), a.width) for m in sizes}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, Master(Path(name) / "master.log") as master:
        ends = Ends(master.address, int(max(sizes) * 1.2e6) + 4 * MIB)
        try:
            for m, states in samples.items():
                for codec in CODECS:
                    ways = ends.ways(states, codec)
                    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
                    for turn in range(a.warmup + a.repeats):
                        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                            taken = ways[way]()
                            if turn >= a.warmup:
                                seconds[way].append(taken)
                    found = {"megabytes": m, "codec": codec, **compare(seconds, len(states.pack("bytes", codec)))}
                    rows.append(found)
                    print(f"{m:g} MB in {codec}: {found['ratio']:.3f} of Mooncake's rate, with packing {found['sample_ratio']:.3f}", flush=True)
        finally:
            ends.close()
    by = {(r["megabytes"], r["codec"]): r["bytes"] for r in rows}
    result = {
        "benchmark": "transfer",
        "ratio": min(r["ratio"] for r in rows),
        "sample_ratio": min(r["sample_ratio"] for r in rows),
        "bytes_ratio": max(by[m, "fp8"] / by[m, "bf16"] for m in sizes),
        "samples": rows,
        "arguments": vars(a),
        **facts(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
