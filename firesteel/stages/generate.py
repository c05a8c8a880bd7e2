"""Ask the target one thing with a packaged drafter."""

from __future__ import annotations

from pathlib import Path

from firesteel.batches.anchors import seeded
from firesteel.decoding.decode import decode_speculative
from firesteel.package.load import describe
from firesteel.prompts.template import answer_text, encode_prompt
from firesteel.stages.line import Line
from firesteel.stages.runtime import open_package
from firesteel.stages.schedule import make_scheduler


def generate_once(line: Line, folder: Path, prompt: str, max_new_tokens: int, temperature: float, *, scheduled: bool = False) -> None:
    """Decode an answer and say how much of it was drafted; `scheduled`: verify as much as pays by this machine's measured costs."""
    contract = describe(folder)[1]
    if contract is not None and not line.recipe.target.template_options:
        line.recipe.target.template_options = contract.template_options
    runtime = open_package(line, folder)
    ids = encode_prompt(line.target.tokenizer, [{"role": "user", "content": prompt}])
    found = decode_speculative(
        runtime.target,
        runtime.session,
        ids,
        draft_tokens=runtime.num_drafts,
        max_new_tokens=max_new_tokens,
        eos_ids=line.target.spec.eos_ids,
        temperature=temperature,
        generator=seeded(line.recipe.seed),
        rejection=line.recipe.evaluate.rejection,
        lengths=make_scheduler(line, runtime, ids) if scheduled else None,
    )
    line.screen.say(answer_text(line.target.tokenizer, found.tokens, found.finish_reason))
    accepted = sum(r.accepted for r in found.rounds)
    pace = len(found.tokens) / max(found.seconds_decode, 1e-9)
    line.screen.say(
        f"[{len(found.tokens)} tokens in {len(found.rounds)} rounds, {accepted} drafted, acceptance length {found.acceptance_length:.2f}, {pace:.1f} tokens/s]"
    )
