"""Firesteel against speculators 0.9.0: the same answers of the target, the same minutes of training, acceptance measured by the same decoder.

Ours is the line up to `package`, with `train.max_minutes` set to the budget. The peer then trains on the same documents
with its own trainer, for the same wall-clock time, validation pauses included on both sides, in one or both of two arms:
`default` keeps every default of the peer for the algorithm; `copied` copies from our recipe whatever the peer has an option
for (what it has none for is listed under `not_copied`). Each checkpoint is then opened as Firesteel opens any checkpoint
and decodes the same held-out prompts greedily. Not counted for the peer: writing its data, and the steps it times first.
`--prepare` ends before the first timed minute: answers, states and the peer's data are then there for the race itself.
The last line of stdout is one JSON object; `ratio` of an arm is our acceptance length over the peer's, on shared prompts, and the object's own the
smallest of the arms'.

Usage: python benchmarks/race.py RECIPE [section.key=value ...] --minutes 30 [--arm default] [--arm copied] [--prepare]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export_states import Pair, export_states
from torch import Tensor

from firesteel.artifact import package_versions
from firesteel.decoding.decode import decode_speculative
from firesteel.evaluation.acceptance import acceptance_length, compare_drafters
from firesteel.evaluation.machine import machine_facts
from firesteel.evaluation.records import RequestRecord, RoundRecord
from firesteel.kernels.linear import wants_half
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.parts import AnswerParts
from firesteel.prompts.template import AnsweredTurn, encode_prompt
from firesteel.recipe import Recipe, load_recipe
from firesteel.stages import extract
from firesteel.stages import prompts as prompts_stage
from firesteel.stages.line import Bar, Line
from firesteel.stages.runtime import Runtime, open_package
from firesteel.stages.train import load_trained, take
from firesteel.target.loading import resolve_target

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PREPARE = ("prompts", "respond", "extract")
TIMED = ("train", "calibrate", "package")
CODEC_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}  # the peer reads no fp8 of ours
LOSS_NAMES = {"ce": "ce", "tv": "tv", "kl": "kl_div", "reverse_kl": "rkl", "jsd": "jsd"}


def main() -> None:
    options = parse()
    if not PEER_PYTHON.is_file():
        raise SystemExit("there is no .venv-peers: build it with `make bench-peers`")
    overrides = [*options.overrides, f"train.max_minutes={options.minutes}"]
    run_verbs(PREPARE, options.recipe, overrides)
    recipe = load_recipe(options.recipe, overrides)
    line = Line(recipe, StderrScreen())
    documents, train_documents = read_documents(line)
    arms = [Arm(name, recipe.run_dir / "race" / name) for name in options.arm or ["copied"]]
    write_data(line, arms, documents)
    if options.prepare:
        return
    run_verbs(TIMED, options.recipe, overrides)
    line = Line(recipe, StderrScreen())
    prompts = prompts_stage.read_prompts(line.input("prompts"), "eval")
    ours = answers(line, open_package(line, line.input("package").path), "ours", prompts, options.prompts)
    trained = {a.name: train_peer(line, a, (train_documents + 0.5) / len(documents), options.minutes) for a in arms}
    result = {"benchmark": "race", "recipe": recipe.model_dump(), "minutes": options.minutes, "peer": "speculators 0.9.0"}
    result |= {"documents": len(documents), "train_documents": train_documents, "tokens": sum(len(ids) for ids, _ in documents)}
    result["ours"] = {**lengths(ours, recipe), "training": line.input("train").manifest.about}
    for name, peer in trained.items():
        theirs = answers(line, open_package(line, Path(peer["checkpoint"])), name, prompts, options.prompts)
        comparison = compare_drafters(ours, theirs, resamples=recipe.evaluate.bootstrap, seed=recipe.seed)
        compared = {"comparison": comparison and comparison.model_dump(), "ratio": comparison and comparison.ratio}
        result[name] = {**lengths(theirs, recipe), **compared, "training": peer}
    ratios = [result[name]["ratio"] for name in trained if result[name]["ratio"] is not None]
    result |= {
        "ratio": min(ratios, default=None),
        "versions": package_versions(),
        "machine": machine_facts(accelerator=None).model_dump(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a named recipe or a YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--minutes", type=float, default=30.0, help="training time of each side")
    parser.add_argument("--arm", action="append", choices=["default", "copied"], help="settings of the peer; may be given twice")
    parser.add_argument("--prepare", action="store_true", help="stop before the first timed minute")
    parser.add_argument("--prompts", type=int, help="held-out prompts at most, spread over the domains; all if not given")
    return parser.parse_intermixed_args()


def read_documents(line: Line) -> tuple[list[Pair], int]:
    """Token ids and loss masks: first of the documents to train on, then of those that our training validates on; and how many are to train on."""
    hidden = line.input(extract.NAME)
    store = extract.open_store(line, hidden)
    held_out = take(extract.read_index(hidden, "validation"), line.recipe.train.validation_tokens)
    keys = [[d.key for d in listed] for listed in (extract.read_index(hidden, "train"), held_out)]
    samples = [store.get(k) for split in keys for k in split]
    return [(s.token_ids, s.loss_mask) for s in samples], len(keys[0])


@dataclass
class Arm:
    """One way of asking the peer, and its folder: `data` (states), `data.json` and `result.json` (what was asked for them)."""

    name: str
    home: Path

    def layer_ids(self, line: Line) -> list[int]:
        """The layers of the target that the peer's data must hold: the peer's own choice, or ours."""
        layers = line.target.spec.num_layers
        return [2, layers // 2, layers - 3] if self.name == "default" else list(line.layer_ids)

    def data(self, line: Line) -> dict[str, Any]:
        """What its data are made of."""
        return {
            "hidden": line.input(extract.NAME).manifest.content,
            "layer_ids": self.layer_ids(line),
            "validation_tokens": line.recipe.train.validation_tokens,
        }

    def said(self, name: str) -> dict[str, Any]:
        """What a file of the arm says; empty without the file."""
        path = self.home / name
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def finished(self, data: dict[str, Any], minutes: float) -> dict[str, Any] | None:
        """The result that is there already for the same data and minutes."""
        found = self.said("result.json")
        return found if found and found["data"] == data and found["minutes"] == minutes else None


def run_verbs(verbs: tuple[str, ...], recipe: str, overrides: list[str]) -> None:
    """Stages of the line, each in a process of its own."""
    for verb in verbs:
        subprocess.run([sys.executable, "-m", "firesteel.cli.app", verb, recipe, *overrides], check=True)


def write_data(line: Line, arms: list[Arm], documents: list[Pair]) -> None:
    """The peer's data for all arms that lack them, in one pass over the target. Arms with a result need none."""
    hidden, minutes = line.recipe.hidden, line.recipe.train.max_minutes
    missing = [a for a in arms if a.finished(a.data(line), minutes or 0.0) is None and a.said("data.json") != a.data(line)]
    for arm in missing:
        shutil.rmtree(arm.home, ignore_errors=True)
        arm.home.mkdir(parents=True)
    if missing:
        folders = {a.home / "data": a.layer_ids(line) for a in missing}
        half = wants_half(hidden.precision, line.target.device)
        with line.screen.bar("writing the peer's data", len(documents)) as bar:
            export_states(line.target, documents, folders, CODEC_DTYPES[hidden.codec], bar.set, half=half, batch_tokens=hidden.batch_tokens)
    for arm in missing:
        (arm.home / "data.json").write_text(json.dumps(arm.data(line)))


def train_peer(line: Line, arm: Arm, ratio: float, minutes: float) -> dict[str, Any]:
    """Train the peer on its data, then drop the data. What was trained for the same data, options and minutes is taken as it is.

    Args:
        ratio: share of the documents that are for training.
    """
    flags, tables, left_out = arm_settings(line, arm)
    flags += ["--data-path", str(arm.home / "data"), "--train-data-ratio", str(ratio)]
    found = arm.finished(arm.data(line), minutes)
    if found is not None:
        if found["asked"] != flags:
            raise SystemExit(f"{arm.home / 'result.json'} was trained with other options: delete {arm.home} to train again")
        return found
    for path, table in tables.items():
        np.save(path, table.numpy())
    print(f"training the peer ({arm.name})", file=sys.stderr)
    command = [str(PEER_PYTHON), str(HERE / "peers" / "speculators_train.py"), "--minutes", str(minutes), "--save", str(arm.home / "trained")]
    run = subprocess.run([*command, "--", *flags], stdout=subprocess.PIPE, text=True, check=True)
    found = {**json.loads(run.stdout.splitlines()[-1]), "not_copied": left_out, "asked": flags, "data": arm.data(line)}
    (arm.home / "result.json").write_text(json.dumps(found))
    shutil.rmtree(arm.home / "data")
    (arm.home / "data.json").unlink()
    return found


def arm_settings(line: Line, arm: Arm) -> tuple[list[str], dict[Path, Tensor], list[str]]:
    """The peer's options for an arm, files of vocabulary tables to write, and which of our settings in force it has no option for."""
    recipe = line.recipe
    base = ["--speculator-type", recipe.drafter.algorithm, "--verifier-name-or-path", resolve_target(recipe.target), "--seed", str(recipe.seed)]
    if arm.name == "default":
        return base, {}, []
    trained = load_trained(line, recipe.drafter.algorithm)
    config, loss, train = trained.config, recipe.loss, recipe.train
    full = [str(i) for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    given: dict[str, list[Any]] = {
        "--num-layers": [config.num_layers],
        "--block-size": [config.block_size],
        "--target-layer-ids": list(config.layer_ids),
        "--mask-token-id": [config.mask_token_id],
        "--full-attention-indices": full,
        "--sliding-window": [config.sliding_window],
        "--total-seq-len": [train.batch_tokens],
        "--max-anchors": [train.anchors],
        "--loss-fn": [loss_option(recipe)],
        "--per-position-loss-weight": ["dpace" if loss.position_weights == "dpace" else "fixed-exp-decay"],
        "--dflash-decay-gamma": [loss.decay],
        "--dpace-alpha": [loss.dpace_smoothing],
        "--optimizer": [train.optimizer],
        "--lr": [train.lr],
        "--muon-lr": [train.muon_lr],
        "--weight-decay": [train.weight_decay],
        "--muon-weight-decay": [train.weight_decay],
        "--scheduler-type": ["cosine"],
        "--scheduler-warmup-ratio": [train.warmup],
    }
    flags = [word for option, values in given.items() if values for word in (option, *map(str, values))]
    flags.append("--sample-from-anchor" if config.sample_from_anchor else "--no-sample-from-anchor")
    flags.append("--no-sliding-window-non-causal" if config.causal else "--sliding-window-non-causal")
    if config.algorithm == "dspark":
        flags += ["--markov-rank", str(config.markov_rank), "--markov-head-type", config.markov_head, "--confidence-head-alpha", str(loss.confidence)]
    tables: dict[Path, Tensor] = {}
    if trained.vocab is not None:
        tables = {arm.home / "d2t.npy": trained.vocab.d2t, arm.home / "t2d.npy": trained.vocab.t2d}
        flags += ["--draft-vocab-size", str(len(trained.vocab)), "--d2t-path", str(arm.home / "d2t.npy"), "--t2d-path", str(arm.home / "t2d.npy")]
    return base + flags, tables, not_copied(recipe)


def loss_option(recipe: Recipe) -> str:
    """Our loss in the peer's words: a plain name where one term stands alone (D-PACE accepts nothing else), else JSON."""
    terms = {theirs: getattr(recipe.loss, ours) for ours, theirs in LOSS_NAMES.items() if getattr(recipe.loss, ours)}
    return next(iter(terms)) if list(terms.values()) == [1.0] else json.dumps(terms)


def not_copied(recipe: Recipe) -> list[str]:
    """Settings in force that the peer has no option for."""
    drafter, train, loss = recipe.drafter, recipe.train, recipe.loss
    sizes = (drafter.intermediate_size, drafter.num_heads, drafter.num_kv_heads, drafter.head_dim)
    differing = {
        "drafter.init=target": drafter.init == "target",
        "sizes of the drafter's layers (it takes the target's)": any(s is not None for s in sizes),
        f"train.accumulate={train.accumulate}": train.accumulate > 1,
        f"train.clip={train.clip} (1.0 there)": train.clip != 1.0,
        f"train.beta2={train.beta2} (0.999 there)": train.beta2 != 0.999,
        f"train.final_lr={train.final_lr} (0 there)": train.final_lr != 0,
        f"loss.warm_kl={loss.warm_kl}": loss.warm_kl > 0,
        f"loss.position_weights={loss.position_weights}": loss.position_weights == "uniform",
    }
    return [what for what, differs in differing.items() if differs]


def answers(line: Line, runtime: Runtime, name: str, prompts: list[Prompt], limit: int | None) -> list[RequestRecord]:
    """Greedy answers to the held-out prompts, every turn of them, with the drafter's full draft length."""
    chosen = prompts if limit is None else prompts[:: max(1, len(prompts) // limit)][:limit]
    tokenizer, settings = line.target.tokenizer, line.recipe.evaluate
    parts = AnswerParts(tokenizer)
    records: list[RequestRecord] = []
    with line.screen.bar(f"decoding with {name}", sum(len(p.slots) for p in chosen)) as bar:
        for prompt in chosen:
            turns: list[AnsweredTurn] = []
            for number in range(len(prompt.slots)):
                ids = encode_prompt(tokenizer, prompt.history([t.message() for t in turns]), prompt.tools, where=prompt.where)
                found = decode_speculative(
                    runtime.target,
                    runtime.session,
                    ids,
                    draft_tokens=runtime.num_drafts,
                    max_new_tokens=settings.max_new_tokens,
                    eos_ids=line.target.spec.eos_ids,
                )
                turns.append(parts.turn(ids, found.tokens, found.finish_reason, prompt.tools))
                rounds = [RoundRecord(r.drafted, r.accepted, None) for r in found.rounds]
                records.append(RequestRecord(prompt.domain, f"{prompt.id}/{number}", name, 0.0, len(found.tokens), found.finish_reason, rounds))
                bar.advance()
    return records


def lengths(records: list[RequestRecord], recipe: Recipe) -> dict[str, Any]:
    """Acceptance length with its interval."""
    found = acceptance_length(records, resamples=recipe.evaluate.bootstrap, seed=recipe.seed)
    return {"acceptance_length": found and found.model_dump()}


class StderrScreen:
    """Says what the stages have to say on stderr; stdout is for the result."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    warn = say

    def bar(self, label: str, total: float) -> StderrBar:
        self.say(f"{label}: {total:g}")
        return StderrBar()


class StderrBar:
    """A progress bar that shows nothing."""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def advance(self, amount: float = 1, note: str = "") -> None:
        return None

    def set(self, done: float, note: str = "") -> None:
        return None


if __name__ == "__main__":
    main()
