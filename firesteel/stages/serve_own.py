"""`firesteel serve --engine own`: target and drafter by Firesteel's own batched engine, behind an OpenAI-compatible API in this process."""

from __future__ import annotations

import copy
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from firesteel import __version__
from firesteel.artifact import write_atomic
from firesteel.decoding.batched.engine import Engine
from firesteel.errors import ArtifactError, CheckpointError, RecipeError
from firesteel.package.export import CONTRACT
from firesteel.package.load import describe
from firesteel.prompts.template import decode_ids, encode_prompt
from firesteel.prompts.token_bytes import token_bytes
from firesteel.serving.server import Server
from firesteel.serving.service import Served, Service
from firesteel.serving.smoke import smoke_check, time_both
from firesteel.stages.engine import open_engine
from firesteel.stages.line import Line
from firesteel.stages.serve import NAME, held_out, warn_of_template
from firesteel.target.template_options import check_options

_SECONDS = 60
# Tokens of a step up to which memory bounds it, and a core is left to the server and its clients.
_SPARE = 10


def run(line: Line, package: Path | None, *, dry_run: bool, smoke: bool) -> None:
    """Serve until SIGTERM or Ctrl-C; or check with held-out prompts that as much is accepted as was measured, time them with and without drafts (`smoke`),
    and stop.

    Args:
        package: an exported folder; None takes the run's own. With serve.policy=plain none is needed.

    Raises:
        ArtifactError: nothing is packaged.
        CheckpointError: the drafter is damaged, or belongs to another target.
        RecipeError: settings that this engine has not.
        TargetError: the port is taken.
        VerificationError: less is accepted than was measured, or more on the same prompts; or nothing was measured.
    """
    settings = line.recipe.serve
    _refuse_vllms_settings(line, dry_run)
    folder = None if settings.policy == "plain" else _packaged(line, package)
    if smoke:
        _check(line, folder)
        return
    server = Server(settings.host, settings.port)
    try:
        engine = open_engine(line, folder, spare=_SPARE)
    except BaseException:
        server.close()
        raise
    contract = None if folder is None else describe(folder)[1]
    if contract is not None:
        warn_of_template(line, contract.template_options)
    line.screen.say(f"serve: {_describe(line, engine)}")
    line.screen.say(f"serve: {server.url}/v1 (OpenAI's API), {server.url} (a page to try it), {server.url}/metrics; Ctrl-C stops it")
    if settings.api_key is None and settings.host not in ("127.0.0.1", "localhost", "::1"):
        line.screen.warn("serve: other machines can reach this server, and it asks for no key: set serve.api_key")
    server.run(Service(served_model(line), engine, settings))
    line.screen.say("serve: stopped")


def served_model(line: Line) -> Served:
    """The line's target as clients see it."""
    target, tokenizer = line.target, line.target.tokenizer
    # Encoding happens in another thread than decoding, and a tokenizer is not made for two at once.
    encoder = copy.deepcopy(tokenizer)

    def encode_chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]) -> list[int]:
        check_options(encoder.chat_template, options, where="chat_template_kwargs")
        return encode_prompt(encoder, messages, tools, where="the request", options=options)

    return Served(
        name=line.recipe.serve.model_name or line.recipe.target.model,
        encode=lambda text: list(encoder(text)["input_ids"]),
        encode_chat=encode_chat,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        token_text=lambda token: decode_ids(tokenizer, [token]),
        token_bytes=token_bytes(tokenizer),
        eos_ids=frozenset(target.spec.eos_ids),
        vocab_size=target.spec.vocab_size,
        created=int(time.time()),
    )


def _check(line: Line, folder: Path | None) -> None:
    if folder is None:
        raise RecipeError("--smoke checks a drafter, and serve.policy=plain serves none", mend="leave out serve.policy")
    # What was measured is acceptance at a fixed length; the other policies verify fewer drafts.
    settings = line.recipe.serve.model_copy(update={"policy": "fixed", "api_key": None})
    line = replace(line, recipe=line.recipe.model_copy(update={"serve": settings}))
    engine = open_engine(line, folder, spare=_SPARE)
    asked = held_out(line, folder, engine.draft_tokens, needed=True)
    server, service = Server("127.0.0.1", 0), Service(served_model(line), engine, settings)
    thread = threading.Thread(target=server.run, args=(service,), name="firesteel-server")
    thread.start()
    try:
        server.wait_until_up(_SECONDS)
        found = smoke_check(
            server.url, asked.prompts, asked.expected, max_new_tokens=asked.max_new_tokens, tolerance=settings.tolerance, timeout=settings.request_timeout
        )
        pace = time_both(server.url, asked.prompts, max_new_tokens=asked.max_new_tokens, timeout=settings.request_timeout)
    finally:
        server.stop()
        thread.join()
    line.screen.say(
        f"serve: acceptance length {found.acceptance_length:.3f} by the server's own counters ({found.counters.drafts} rounds, {found.prompts} prompts); "
        f"{asked.expected.acceptance_length:.3f} measured on {asked.expected.measured_on}"
    )
    told = f"{pace.drafted:.1f} tokens/s with {engine.draft_tokens} drafts a round, {pace.plain:.1f} without, one answer at a time on these prompts"
    if pace.ratio < 1:
        line.screen.warn(f"serve: the drafter makes it slower, {pace.ratio:.2f} times: {told}; serve.policy=scheduled drafts only what pays")
    else:
        line.screen.say(f"serve: {pace.ratio:.2f} times the speed of plain decoding: {told}")
    (line.folder / NAME).mkdir(parents=True, exist_ok=True)
    checked = {**found.to_dict(), "engine": f"firesteel {__version__}", "speed": pace.to_dict()}
    write_atomic(line.folder / NAME / "smoke_own.json", json.dumps(checked, indent=1) + "\n")


def _packaged(line: Line, package: Path | None) -> Path:
    folder = line.folder / "package" if package is None else package
    if not (folder / "config.json").is_file():
        raise ArtifactError(
            f"there is no packaged drafter in {folder}", mend="`firesteel run RECIPE` makes one; serve.policy=plain serves the target without any"
        )
    if not (folder / CONTRACT).is_file():
        raise CheckpointError(f"{folder} has no contract", mend="`firesteel convert` with --target writes one")
    return folder


def _refuse_vllms_settings(line: Line, dry_run: bool) -> None:
    settings = line.recipe.serve
    if dry_run:
        raise RecipeError("--dry-run prints vLLM's commands; the own engine has no other command than this one", mend="add --engine vllm, or leave it out")
    for name, usual in (("nodes", 1), ("tensor_parallel", 1), ("args", [])):
        if getattr(settings, name) != usual:
            raise RecipeError(f"serve.{name} is vLLM's: the own engine runs in this process", mend=f"leave out serve.{name}, or serve with --engine vllm")


def _describe(line: Line, engine: Engine) -> str:
    size = f"up to {engine.max_requests} answers at a time, {engine.pool.blocks * engine.pool.size} positions in the cache, {engine.max_length} an answer"
    drafts = "no drafter" if engine.drafter is None else f"{engine.draft_tokens} drafts a round at most ({line.recipe.serve.policy})"
    return f"{line.target.spec.name}, {drafts}, {size}, {_reuse(engine)}"


def _reuse(engine: Engine) -> str:
    """What becomes of beginnings that were read before."""
    if not engine.target.shares_prefix:
        return "every prompt is read whole (this target runs sequence by sequence)"
    if engine.drafter is not None and not engine.drafter.shares_prefix:
        return "prompts are read whole but for requests without the drafter, which runs sequence by sequence"
    return "beginnings that were read before are not read again"
