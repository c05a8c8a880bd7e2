"""Model card: README.md of a checkpoint. A number that was not measured is said to be absent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.package.contract import Contract, Promise
from firesteel.package.export import Exported

ABSENT = "not measured"


def model_card(config: DraftConfig, contract: Contract, *, numbers: Mapping[str, Any] | None, training: Mapping[str, Any] | None, exported: Exported) -> str:
    """The card as Markdown with a YAML front matter.

    Args:
        numbers: measured results, any of them missing or None: `acceptance_length`, `acceptance_length_interval`, `draft_length`, `requests`,
            `temperature`, `acceptance_length_by_domain` {name: length}, `speedup`, `speedup_interval`, `speedup_draft_length`, `machine`, `cores`;
            of the confidences, means over positions `ece_before`, `ece_after`, `auc_before`, `auc_after` (validation), `ece_held_out`, `auc_held_out`
            (prompts of the report), and per position `ece_held_out_per_position`, `auc_held_out_per_position`.
        training: how it was trained, any of them missing or None: `steps`, `epochs`, `train_seconds`, `documents`, `tokens`, `best_step`,
            `coverage` (share of the answers' tokens that a reduced vocabulary holds).
        exported: what was written.
    """
    sections = [
        _front_matter(config, contract),
        f"# {_title(config)} drafter for {contract.target_name}",
        _what(config, contract, exported),
        "## Numbers\n\n" + _numbers(contract, numbers or {}),
        *(["## Calibration of the confidences\n\n" + _calibration(contract, numbers or {})] if config.confidence_head else []),
        "## How it was trained\n\n" + _training(config, contract, training or {}),
        "## How to serve it\n\n" + _serving(config, contract),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in limits(config, contract)),
    ]
    return "\n\n".join(sections) + "\n"


def speculative_config(config: DraftConfig, contract: Contract, model_path: str) -> dict[str, Any]:
    """What vLLM takes as `--speculative-config`."""
    spec = get_spec(config.algorithm)
    own = {} if spec.stitch else {"model": model_path}
    return {**own, "method": spec.method, "num_speculative_tokens": contract.speculative_tokens, **spec.serving}


def limits(config: DraftConfig, contract: Contract) -> list[str]:
    """What a user must know before serving, a sentence each."""
    found = [
        f"It speeds up this target only (fingerprint `{contract.target_fingerprint}`): another revision or fine-tune accepts less, "
        "and other engines do not warn of it.",
        "Speculative decoding changes speed, never the target's output distribution; a poor drafter is slow, not wrong.",
        "Text unlike the training prompts (other languages, domains or sampling settings) is accepted less.",
    ]
    found += get_spec(config.algorithm).limits(config)
    if FULL in config.layer_types:
        found.append("Full attention over the context was trained on limited lengths; acceptance falls on much longer prompts.")
    if config.reduced_vocab:
        found.append(
            f"It proposes {config.draft_vocab_size:,} of {config.vocab_size:,} tokens; the others are never drafted. "
            "The file holds the target's LM head rows of these tokens, so the target's licence applies to them."
        )
    if config.confidence_head and not contract.temperatures:
        found.append("Its confidences are not calibrated.")
    return found


def _front_matter(config: DraftConfig, contract: Contract) -> str:
    native = get_spec(config.algorithm).native
    library = "vllm" if native is not None and native.covers(config) else "speculators"  # who opens the folder
    data = {
        "license": "apache-2.0",
        "base_model": contract.target_name,
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": [*dict.fromkeys(["speculative-decoding", library, "draft-model", config.algorithm, "vllm", "firesteel"])],
    }
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---"


def _title(config: DraftConfig) -> str:
    return get_spec(config.algorithm).title


def _what(config: DraftConfig, contract: Contract, exported: Exported) -> str:
    heads = []
    if config.markov_rank:
        heads.append(f"a {config.markov_head} Markov head of rank {config.markov_rank}")
    if config.confidence_head:
        heads.append("a confidence head")
    return (
        f"Drafts {config.num_drafts} tokens per round for {contract.target_name} ({contract.target_architecture}): {config.num_layers} layers of width "
        f"{config.hidden_size}, fed with the target's hidden states {list(config.layer_ids)}{', ' if heads else ''}{' and '.join(heads)}. "
        f"{exported.parameters:,} trained parameters in {exported.file_bytes / 1e6:,.1f} MB; embedding and LM head are the target's own."
    )


def _numbers(contract: Contract, numbers: Mapping[str, Any]) -> str:
    length, speed = numbers.get("acceptance_length"), numbers.get("speedup")
    measured = [f"{numbers[key]} {word}" for key, word in (("requests", "prompts"), ("draft_length", "drafts a round")) if numbers.get(key) is not None]
    if numbers.get("temperature") is not None:
        measured.append(f"temperature {numbers['temperature']:g}")
    timed = ["one prompt at a time"] if speed is not None else []
    if speed is not None and numbers.get("speedup_draft_length") is not None:
        timed.append(f"{numbers['speedup_draft_length']} drafts a round")
    lines = [
        "| | value | 95% interval | from |",
        "|---|---|---|---|",
        f"| Acceptance length, pooled: 1 + accepted / rounds | {_value(length)} | {_interval(numbers, 'acceptance_length')} | {_list(measured)} |",
        f"| Acceptance length in validation (the promise) | {_promise(contract.promise)} |",
        f"| Speed-up of decoding over the plain target | {_value(speed, 'x')} | {_interval(numbers, 'speedup')} | {_list(timed)} |",
        "",
    ]
    domains = numbers.get("acceptance_length_by_domain") or {}
    if domains:
        lines += ["| domain | acceptance length, pooled |", "|---|---|", *(f"| {name} | {_value(value)} |" for name, value in domains.items())]
    else:
        lines.append(f"By domain: {ABSENT}.")
    if numbers.get("machine") is not None:
        cores = "" if numbers.get("cores") is None else f" ({numbers['cores']} cores)"
        lines += ["", f"Measured on {numbers['machine']}{cores}; speed depends on the machine, acceptance does not."]
    return "\n".join(lines)


def _calibration(contract: Contract, numbers: Mapping[str, Any]) -> str:
    """ECE and AUC of the predicted survival of a prefix: means over positions as evaluation has them, and position by position."""
    table = contract.calibration
    fitted = contract.temperatures
    held = {name: numbers.get(f"{name}_held_out_per_position") or [] for name in ("ece", "auc")}
    lines = [
        "Predicted against observed survival of the drafted prefix: expected calibration error (ECE, 0 is perfect) and area under the ROC curve "
        "(AUC, 1 is perfect, 0.5 is chance), before and after the temperatures, and on the held-out prompts with them.",
        "",
        "| position | temperature | ECE before | ECE after | ECE, held-out prompts | AUC before | AUC after | AUC, held-out prompts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = {} if table is None else {row.position: row for row in table.positions}
    for k in range(1, max(len(fitted), len(held["ece"])) + 1):
        row = rows.get(k)
        before, after = ((row.ece_before, row.auc_before), (row.ece_after, row.auc_after)) if row else ((None, None), (None, None))
        met = [held[name][k - 1] if k <= len(held[name]) else None for name in ("ece", "auc")]
        cells = [before[0], after[0], met[0], before[1], after[1], met[1]]
        lines.append(f"| {k} | {_value(fitted[k - 1] if k <= len(fitted) else None)} | {' | '.join(map(_share, cells))} |")
    means = [numbers.get(name) for name in ("ece_before", "ece_after", "ece_held_out", "auc_before", "auc_after", "auc_held_out")]
    lines.append(f"| mean | | {' | '.join(map(_share, means))} |")
    lines += ["", f"Before and after: {ABSENT if table is None else f'on {table.measured_on}'}."]
    return "\n".join(lines)


def _share(number: float | None) -> str:
    return ABSENT if number is None else f"{number:.3f}"


def _value(number: float | None, unit: str = "") -> str:
    return ABSENT if number is None else f"{number:.2f}{unit}"


def _interval(numbers: Mapping[str, Any], name: str) -> str:
    interval = numbers.get(f"{name}_interval")
    return ABSENT if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def _list(parts: list[str]) -> str:
    return ", ".join(parts) or ABSENT


def _promise(promise: Promise | None) -> str:
    if promise is None:
        return f"{ABSENT} | {ABSENT} | {ABSENT}"
    basis = f"{promise.rounds:,} rounds on {promise.measured_on}, {promise.draft_length} drafts a round, temperature {promise.temperature:g}"
    return f"{promise.acceptance_length:.2f} | {ABSENT} | {basis}"


def _training(config: DraftConfig, contract: Contract, training: Mapping[str, Any]) -> str:
    seconds, coverage = training.get("train_seconds"), training.get("coverage")
    covered = "" if coverage is None or not config.reduced_vocab else f", {coverage:.1%} of the answers' tokens"
    softcap = "no soft-cap" if contract.target_softcap is None else f"soft-cap {contract.target_softcap:g}"
    anchor = "sampling from the anchor" if config.sample_from_anchor else "the anchor slot predicts nothing"
    window = f" (window {config.sliding_window})" if SLIDING in config.layer_types else ""
    rows = {
        "Answers": f"written by the target itself (thinking mode: {contract.thinking or 'as the chat template has it'})",
        "Documents": _count(training.get("documents")),
        "Tokens": _count(training.get("tokens")),
        "Passes over them": _value(training.get("epochs")),
        "Optimiser steps": _count(training.get("steps")),
        "Best step, by acceptance length": _count(training.get("best_step")),
        "Training time": ABSENT if seconds is None else f"{seconds / 60:.1f} minutes",
        "Block": f"{config.block_size} slots, {anchor}, {'causal' if config.causal else 'bidirectional'}",
        "Attention over the context": ", ".join(t.removesuffix("_attention") for t in config.layer_types) + window,
        "Vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens{covered}",
        "Target's logits": f"{softcap}, scale {contract.target_logit_scale:g}",
        "Confidence temperatures": ", ".join(f"{t:.2f}" for t in contract.temperatures) or ABSENT,
        "Software": ", ".join(f"{name} {version}" for name, version in contract.versions.items()) or ABSENT,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _count(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}"


def _serving(config: DraftConfig, contract: Contract) -> str:
    text = json.dumps(speculative_config(config, contract, "PATH_OF_THIS_FOLDER"))
    # A `pypi:` name is Firesteel's own; vLLM wants a folder or a hub name.
    name = "PATH_OF_THE_TARGET" if contract.target_name.startswith("pypi:") else contract.target_name
    stitching = ""
    if get_spec(config.algorithm).stitch:
        stitching = f"Servers load it with the target, from one folder:\n\n```bash\nfiresteel stitch PATH_OF_THIS_FOLDER {name} NEW_FOLDER\n```\n\n"
        name = "NEW_FOLDER"
    return stitching + (
        f"```bash\nvllm serve {name} --speculative-config '{text}'\n```\n\n"
        f"`num_speculative_tokens` may be at most {config.num_drafts}. "
        "`firesteel.json` is the train/serve contract: Firesteel refuses to decode where it does not hold."
    )
