"""Drafters for the counting target: one walk to the hidden states, then one training, package and evaluation per algorithm."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from line_screen import QuietScreen
from torch import Tensor

from firesteel.decoding.decode import decode_speculative
from firesteel.evaluation.report import read_report
from firesteel.prompts.template import encode_prompt
from firesteel.recipe import recipe_from_dict
from firesteel.stages import calibrate, evaluate, extract, package, prompts, respond, train
from firesteel.stages.line import Line
from firesteel.stages.runtime import Proposal, Runtime, open_package

TOKENS = 160
# Name -> what of the recipe's `drafter` differs.
DRAFTS: dict[str, dict[str, Any]] = {
    "dspark-anchor": {},
    "dspark-fill": {"sample_from_anchor": False},
    "dspark-reduced": {"draft_vocab_size": 40, "confidence_with_markov": False},
    "dspark-mixed": {"num_layers": 2, "attention": "mixed", "sliding_window": 16},
    "dspark-sliding-causal": {"attention": "sliding", "sliding_window": 8, "causal": True, "confidence_head": False},
    "dspark-latent": {
        "backbone": "mla",
        "mla": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    },
    "dflash": {"algorithm": "dflash"},
    "dflash-reduced": {"algorithm": "dflash", "draft_vocab_size": 40, "num_layers": 2},
    "dflash2": {"algorithm": "dflash2", "dflash2": {"group": 8, "rank": 8, "top_k": 6}},
    "eagle3": {"algorithm": "eagle3", "draft_vocab_size": 40},
    "eagle3-qwen3": {"algorithm": "eagle3", "num_layers": 2, "eagle": {"layer_style": "qwen3", "norm_output": True, "fc_norm": True}},
    "eagle3-normed": {"algorithm": "eagle3", "eagle": {"norm_before_fc": True, "norm_before_residual": False}},
    "peagle": {"algorithm": "peagle", "draft_vocab_size": 40},
    "peagle-qwen3": {"algorithm": "peagle", "eagle": {"layer_style": "qwen3", "norm_before_fc": True}},
}


@dataclass
class Served:
    """A packaged and evaluated drafter."""

    line: Line
    package: Path
    runtime: Runtime
    report: dict[str, Any]


def make_base(folder: Path) -> Line:
    """Prompts, answers and hidden states, which all drafters share."""
    line = _line(folder, "base", {})
    for stage in (prompts, respond, extract):
        stage.run(line)
    return line


def make_draft(folder: Path, base: Line, name: str) -> Served:
    """Train, package and evaluate one of `DRAFTS`."""
    line = _line(folder, name, DRAFTS[name])
    shutil.copytree(base.folder, line.folder)
    line.__dict__["target"] = base.target
    for stage in (prompts, respond, extract, train, calibrate, package, evaluate):
        stage.run(line)
    return Served(line, line.folder / "package", open_package(line, line.folder / "package"), read_report(line.folder / "report.json"))


def eval_prompts(line: Line) -> list[list[int]]:
    """Token ids of the held-out prompts."""
    found = prompts.read_prompts(line.input("prompts"), "eval")
    return [encode_prompt(line.target.tokenizer, p.history([]), p.tools, where=p.where) for p in found]


class Noting:
    """A drafter's session that remembers what it proposed."""

    def __init__(self, runtime: Runtime) -> None:
        self.inner = runtime.session
        self.drafts: list[list[int]] = []

    def observe(self, tokens: Sequence[int] | Tensor, aux: Tensor) -> None:
        self.inner.observe(tokens, aux)

    def draft(self, anchor: int, count: int, *, temperature: float, generator: torch.Generator | None) -> Proposal:
        found = self.inner.draft(anchor, count, temperature=temperature, generator=generator)
        self.drafts.append(torch.as_tensor(found.tokens).tolist())
        return found

    def rewind(self, length: int) -> None:
        self.inner.rewind(length)


@dataclass
class Ours:
    """Greedy decoding by Firesteel's own engine as a server would do it.

    Attributes:
        accepted: drafted tokens that stand in each round, those behind the end of the answer included.
    """

    tokens: list[int]
    drafts: list[list[int]]
    accepted: list[int]


@dataclass
class Both:
    """One drafter, served by both engines on the same prompts; `theirs` as `engine.py` wrote it, `plain` is vLLM's text without drafts."""

    served: Served
    ours: list[Ours]
    theirs: dict[str, Any]
    plain: list[list[int]]


def decode_ours(served: Served, prompt: list[int], tokens: int) -> Ours:
    """A server drafts in full to the last round; so the engine is let run on, and what begins after the end is cut."""
    noting, eos = Noting(served.runtime), served.line.target.spec.eos_ids
    drafts = served.runtime.num_drafts
    done = decode_speculative(served.runtime.target, noting, prompt, draft_tokens=drafts, max_new_tokens=tokens + 2 * drafts + 2, eos_ids=())
    kept, accepted, written = done.tokens[:tokens], [], 1
    ends = [i for i, token in enumerate(kept) if token in eos]
    kept = kept[: ends[0] + 1] if ends else kept
    for row in done.rounds:
        if written >= len(kept):
            break
        accepted.append(row.accepted)
        written += row.accepted + 1
    return Ours(kept, noting.drafts[: len(accepted)], accepted)


def _line(folder: Path, name: str, drafter: dict[str, Any]) -> Line:
    settings = {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "target": {"model": str(folder / "target"), "layer_ids": [1, 2, 4], "threads": 1},
        "prompts": {
            "sources": [{"path": str(folder / "train.jsonl")}, {"path": str(folder / "eval.jsonl"), "split": "eval"}],
            "validation": 0.1,
            "max_tokens": 64,
        },
        "responses": {"max_new_tokens": 64, "batch_size": 16},
        "hidden": {"codec": "fp32", "max_length": 256, "batch_tokens": 512},
        "drafter": {"block_size": 5, "num_layers": 1, "markov_rank": 8, **drafter},
        "loss": {"ce": 1.0, "tv": 0.0},
        "train": {"max_steps": 150, "batch_tokens": 512, "anchors": 64, "validate_every": 75, "lr": 3e-3, "compile": False},
        "package": {"proof_prompts": 4},
        "evaluate": {"max_new_tokens": TOKENS, "speed_prompts": 0, "bootstrap": 100},
    }
    return Line(recipe_from_dict(settings), QuietScreen())
