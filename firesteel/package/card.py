"""Model card: README.md of a checkpoint. A number that was not measured is said to be absent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.package.contract import Contract, Promise

ABSENT = "not measured"


def make_card(config: DraftConfig, contract: Contract, numbers: Mapping[str, Any], *, model_path: str) -> str:
    """The card as Markdown with a YAML front matter.

    Args:
        numbers: measured results, by the keys of `report.json`: `acceptance_length`, `domains`, `speedup`, `training`, `run`;
            any of them may be missing, null or empty.
        model_path: what vLLM is told to load.
    """
    sections = [
        _front_matter(config, contract),
        f"# {_title(config)} drafter for {contract.target_name}",
        _what(config, contract),
        "## Numbers\n\n" + _numbers(contract, numbers),
        "## How it was trained\n\n" + _training(config, contract, numbers),
        "## How to serve it\n\n" + _serving(config, contract, model_path),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in limits(config, contract)),
    ]
    return "\n\n".join(sections) + "\n"


def speculative_config(config: DraftConfig, contract: Contract, model_path: str) -> dict[str, Any]:
    """What vLLM takes as `--speculative-config`."""
    return {
        "model": model_path,
        "method": config.algorithm,
        "num_speculative_tokens": contract.speculative_tokens,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
    }


def limits(config: DraftConfig, contract: Contract) -> list[str]:
    """What a user must know before serving, a sentence each."""
    found = [
        f"It speeds up this target only (fingerprint `{contract.target_fingerprint}`): another revision or fine-tune accepts less, "
        "and other engines do not warn of it.",
        "Speculative decoding changes speed, never the target's output distribution; a poor drafter is slow, not wrong.",
        "Text unlike the training prompts (other languages, domains or sampling settings) is accepted less.",
    ]
    if config.markov_rank and config.markov_head != "vanilla":
        found.append(f"vLLM serves the `vanilla` Markov head; this drafter has `{config.markov_head}`, which Firesteel's own engine decodes.")
    if SLIDING in config.layer_types and FULL in config.layer_types:
        found.append("Its layers mix sliding and full attention, which vLLM serves with its V2 model runner only.")
    if config.algorithm == "dflash" and config.sample_from_anchor:
        found.append("It samples from the anchor slot, which engines may not support for DFlash.")
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
    data = {
        "license": "apache-2.0",
        "base_model": contract.target_name,
        "library_name": "speculators",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "speculators", "draft-model", config.algorithm, "vllm", "firesteel"],
    }
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---"


def _title(config: DraftConfig) -> str:
    return {"dspark": "DSpark", "dflash": "DFlash"}[config.algorithm]


def _what(config: DraftConfig, contract: Contract) -> str:
    heads = []
    if config.markov_rank:
        heads.append(f"a {config.markov_head} Markov head of rank {config.markov_rank}")
    if config.confidence_head:
        heads.append("a confidence head")
    return (
        f"Drafts {config.num_drafts} tokens per round for [{contract.target_name}] ({contract.target_architecture}): {config.num_layers} layers of width "
        f"{config.hidden_size}, fed with the target's hidden states {list(config.layer_ids)}{', ' if heads else ''}{' and '.join(heads)}. "
        f"Embedding and LM head are the target's own."
    )


def _numbers(contract: Contract, numbers: Mapping[str, Any]) -> str:
    overall, speed = numbers.get("acceptance_length"), numbers.get("speedup")
    lines = [
        "| | value | 95% interval | from |",
        "|---|---|---|---|",
        f"| Acceptance length, pooled: 1 + accepted / rounds | {_value(overall)} | {_interval(overall)} | {_basis(overall)} |",
        f"| Acceptance length in validation (the promise) | {_promise(contract.promise)} |",
        f"| Speed-up of decoding over the plain target | {_value(speed, 'x')} | {_interval(speed)} | {_speed_basis(speed)} |",
    ]
    domains = numbers.get("domains") or {}
    if not domains:
        return "\n".join([*lines, "", f"By domain: {ABSENT}."])
    lines += ["", "| domain | acceptance length | 95% interval | prompts | speed-up |", "|---|---|---|---|---|"]
    for name, domain in domains.items():
        length, faster = domain.get("acceptance_length"), domain.get("speed")
        count = length["requests"] if length and "requests" in length else ABSENT
        lines.append(f"| {name} | {_value(length)} | {_interval(length)} | {count} | {_value(faster, 'x')} |")
    if machine := (numbers.get("run") or {}).get("machine"):
        place = f"{machine['cpu']} ({machine['cores']} cores), {machine.get('accelerator') or 'no accelerator'}"
        lines += ["", f"Measured on {place}; speed depends on the machine, acceptance does not."]
    return "\n".join(lines)


def _value(part: Mapping[str, Any] | None, unit: str = "") -> str:
    return ABSENT if not part or part.get("pooled") is None else f"{part['pooled']:.2f}{unit}"


def _interval(part: Mapping[str, Any] | None) -> str:
    interval = part.get("interval") if part else None
    return ABSENT if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def _basis(part: Mapping[str, Any] | None) -> str:
    return ABSENT if not part else f"{part.get('requests', '?')} prompts, {part.get('draft_length', '?')} drafts a round"


def _speed_basis(part: Mapping[str, Any] | None) -> str:
    return ABSENT if not part else f"{part.get('prompts', '?')} prompts, one at a time, {part.get('draft_length', '?')} drafts a round"


def _promise(promise: Promise | None) -> str:
    if promise is None:
        return f"{ABSENT} | {ABSENT} | {ABSENT}"
    basis = f"{promise.rounds:,} rounds on {promise.measured_on}, {promise.draft_length} drafts a round, temperature {promise.temperature:g}"
    return f"{promise.acceptance_length:.2f} | {ABSENT} | {basis}"


def _training(config: DraftConfig, contract: Contract, numbers: Mapping[str, Any]) -> str:
    facts = (numbers.get("training") or {}).get(config.algorithm) or {}
    steps, seconds, tokens = facts.get("steps"), facts.get("seconds"), facts.get("tokens")
    softcap = "no soft-cap" if contract.target_softcap is None else f"soft-cap {contract.target_softcap:g}"
    anchor = "sampling from the anchor" if config.sample_from_anchor else "the anchor slot predicts nothing"
    window = f" (window {config.sliding_window})" if SLIDING in config.layer_types else ""
    rows = {
        "Answers": f"written by the target itself (thinking mode: {contract.thinking or 'as the chat template has it'})",
        "Optimiser steps": ABSENT if steps is None else f"{steps:,}",
        "Training time": ABSENT if seconds is None else f"{seconds / 60:.1f} minutes",
        "Tokens seen": ABSENT if tokens is None else f"{tokens:,}",
        "Block": f"{config.block_size} slots, {anchor}, {'causal' if config.causal else 'bidirectional'}",
        "Attention over the context": ", ".join(t.removesuffix("_attention") for t in config.layer_types) + window,
        "Vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
        "Target's logits": f"{softcap}, scale {contract.target_logit_scale:g}",
        "Confidence temperatures": ", ".join(f"{t:.2f}" for t in contract.temperatures) or ABSENT,
        "Software": ", ".join(f"{name} {version}" for name, version in contract.versions.items()) or ABSENT,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _serving(config: DraftConfig, contract: Contract, model_path: str) -> str:
    text = json.dumps(speculative_config(config, contract, model_path))
    # A `pypi:` name is Firesteel's own; vLLM wants a folder or a hub name.
    name = "PATH_OF_THE_TARGET" if contract.target_name.startswith("pypi:") else contract.target_name
    return (
        f"```bash\nvllm serve {name} --speculative-config '{text}'\n```\n\n"
        f"`num_speculative_tokens` may be at most {config.num_drafts}. "
        "`firesteel.json` is the train/serve contract: Firesteel refuses to decode where it does not hold."
    )
