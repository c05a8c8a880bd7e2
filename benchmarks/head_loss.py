"""The fused head-and-loss against the bare matrix products it cannot do without, and against the dense reference.

    python benchmarks/head_loss.py --rows 1024 --vocab 49152 --json

A DSpark-like step: rows of width h against a frozen LM head plus rows of width r against a trainable Markov W2, U teacher
positions (half the rows), CE 0.1 + TV 0.9 + confidence 1.0. The last line is one JSON object:
    seconds       fused loss with all gradients, best of --repeats
    floor         the same products in the same chunks, nothing else
    dense         the reference: everything materialised, autograd
    ratio         dense / seconds
    over_floor    seconds / floor
    peak_mb, dense_peak_mb   memory above the inputs while it runs (Linux; else null)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from firesteel.kernels.linear import matmul_nn, matmul_nt, matmul_tn, preferred
from firesteel.losses.dense import dense_loss
from firesteel.losses.fused import fused_loss
from firesteel.losses.types import Head, LossResult, LossWeights, Piece, Teacher

MIX = LossWeights(ce=0.1, tv=0.9, confidence=1.0)


def make_inputs(rows: int, vocab: int, hidden: int, rank: int, block: int) -> tuple[list[Piece], Teacher, Tensor, Tensor, Tensor, Tensor]:
    """Pieces, teacher, labels, weights, slot targets, confidence logits; blocks overlap so that U = rows / 2."""
    blocks = rows // block
    slot_target = torch.arange(blocks)[:, None] * (block // 2) + torch.arange(block)
    slot_target = slot_target.clamp(max=blocks * (block // 2) - 1)
    head, w2 = torch.randn(vocab, hidden) * hidden**-0.5, torch.randn(vocab, rank) * rank**-0.5
    states = torch.randn(int(slot_target.max()) + 1, hidden) * 3
    z = (states[slot_target.view(-1)] + torch.randn(blocks * block, hidden)).requires_grad_()
    pieces = [(z, head), (torch.randn(blocks * block, rank).requires_grad_(), w2.requires_grad_())]
    weights = torch.exp(-torch.arange(block) / 4).expand(blocks, block).contiguous()
    return pieces, Teacher(states, head), torch.randint(0, vocab, (blocks, block)), weights, slot_target, torch.randn(blocks, block).requires_grad_()


def products(pieces: list[Piece], teacher: Teacher, chunk: int) -> None:
    """The floor: every product of the fused step and nothing else."""
    for start in range(0, teacher.states.shape[0], chunk):
        matmul_nt(teacher.states[start : start + chunk], teacher.weight)
    sums = [torch.zeros_like(weight) if weight.requires_grad else None for _, weight in pieces]
    for start in range(0, pieces[0][0].shape[0], chunk):
        x: Tensor | None = None
        for rows, weight in pieces:
            x = matmul_nt(rows[start : start + chunk].detach(), weight.detach(), add=x)
        assert x is not None
        for (rows, weight), total in zip(pieces, sums, strict=True):
            matmul_nn(x, weight.detach())
            if total is not None:
                matmul_tn(x, rows[start : start + chunk].detach(), accumulate=total)


def peak_mb(run: Callable[[], object]) -> float | None:
    """Growth of the resident set while `run` runs, or None where the system does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else freed memory of earlier runs counts as resident already
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        run()
        return (_status("VmHWM") - before) / 1024
    except (OSError, AttributeError):
        return None


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def best(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--eager", action="store_true", help="do not compile the elementwise passes")
    parser.add_argument("--no-dense", action="store_true", help="leave the dense reference out")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pieces, teacher, labels, weights, slot_target, confidence = make_inputs(args.rows, args.vocab, args.hidden, args.rank, args.block)
    leaves = [t for piece in pieces for t in piece if t.requires_grad] + [confidence]

    def step(result: LossResult) -> float:
        torch.autograd.grad(result.loss, leaves)
        return float(result.loss.detach())

    def fused() -> float:
        return step(fused_loss(pieces, Head(), teacher, labels, weights, slot_target, MIX, confidence, chunk_rows=args.chunk, compile=not args.eager))

    def dense() -> float:
        return step(dense_loss(pieces, Head(), teacher, labels, weights, slot_target, MIX, confidence))

    warm = time.perf_counter()
    loss = fused()
    warm = time.perf_counter() - warm
    peak = peak_mb(fused)
    seconds = best(fused, args.repeats)
    floor = best(lambda: products(pieces, teacher, args.chunk), args.repeats)
    record = {
        "benchmark": "head_loss",
        "rows": args.rows,
        "vocab": args.vocab,
        "hidden": args.hidden,
        "rank": args.rank,
        "chunk": args.chunk,
        "threads": torch.get_num_threads(),
        "compiled": not args.eager,
        "loss": loss,
        "seconds": seconds,
        "floor": floor,
        "over_floor": seconds / floor,
        "first_call": warm,
        "peak_mb": peak,
        "backend": preferred(),
    }
    if not args.no_dense:
        record |= {"dense_loss": dense(), "dense_peak_mb": peak_mb(dense), "dense": best(dense, args.repeats)}
        record["ratio"] = record["dense"] / seconds
    if not args.json:
        for key, value in record.items():
            print(f"{key:14s} {value}")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
