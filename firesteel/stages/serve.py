"""`firesteel serve`: target and drafter by a real server, checked with held-out prompts before anyone relies on it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firesteel.artifact import disk_error, hash_file, open_artifact, write_atomic
from firesteel.drafters.registry import get_spec
from firesteel.errors import ArtifactError, CheckpointError, DataError, FiresteelError, RecipeError, VerificationError
from firesteel.evaluation.acceptance import position_rates
from firesteel.evaluation.records import RequestRecord, request_from_json
from firesteel.evaluation.report import read_report
from firesteel.package.card import speculative_config
from firesteel.package.deploy import DEPLOY, TESTED_VLLM, deploy_note
from firesteel.package.export import CONTRACT
from firesteel.package.load import describe, load
from firesteel.package.stitch import stitch
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.sources import load_sources
from firesteel.prompts.template import encode_prompt
from firesteel.serving.command import Engine, find_engine, pick_engine, plain_commands, plan_serving, production_commands, shown_commands, tail
from firesteel.serving.smoke import Expectation, Smoke, smoke_check
from firesteel.stages import prompts as prompts_stage
from firesteel.stages.line import Line
from firesteel.stages.prompts import spread
from firesteel.target.loading import load_tokenizer, resolve_target
from firesteel.target.server import Server, leave_on_signals
from firesteel.training.metrics import read_metrics

NAME = "serve"
_COPY, _COPY_OF = "model", "model.json"


@dataclass(frozen=True)
class HeldOut:
    """What a smoke check sends (token ids), and what it expects."""

    prompts: list[list[int]]
    expected: Expectation
    max_new_tokens: int


def recipe_settings(package: Path) -> dict[str, Any]:
    """What a packaged folder says about its target, as the mapping of a recipe; built-in prompts stand in where the run's own are gone."""
    _, contract = describe(package)
    if contract is None:
        raise CheckpointError(f"{package} has no contract", mend="`firesteel convert` with --target writes one")
    source = {"builtin": "nine-domains", "split": "eval"}
    return {
        "name": NAME,
        "target": {"model": contract.target_name, "template_options": contract.template_options},
        "prompts": {"sources": [source]},
        "train": {"max_steps": 1},
    }


def engine_of(line: Line, *, dry_run: bool) -> str:
    """`vllm` or `own`: what the recipe says, or what suits this machine, which is then said."""
    settings = line.recipe.serve
    if settings.engine != "auto":
        return settings.engine
    if dry_run:  # what is typed in production is vLLM's, whatever this machine has
        return "vllm"
    engine, why = pick_engine(settings, line.recipe.target.vllm)
    name = "vLLM" if engine == "vllm" else "Firesteel's own engine"
    line.screen.say(f"serve: with {name}: {why} (--engine vllm or --engine own chooses, or serve.engine in the recipe)")
    return engine


def run(line: Line, package: Path | None, *, dry_run: bool, smoke: bool) -> None:
    """Print the commands (`dry_run`); or start the server, check it, and keep it until it is stopped (`smoke`: only check it).

    Args:
        package: an exported folder; None takes the run's own.

    Raises:
        ArtifactError: nothing is packaged.
        CheckpointError: vLLM cannot serve this drafter.
        TargetError, ResourceError: the server does not start.
        VerificationError: it accepts less than was measured, or more on the same prompts; or, with `smoke`, nothing was measured.
    """
    folder = line.folder / "package" if package is None else package
    packaged, recipe = (folder / CONTRACT).is_file(), line.recipe
    if dry_run and not packaged:
        line.screen.warn(f"{folder} holds no drafter yet; this is the command for when it does")
    if not packaged:
        if not dry_run:
            raise ArtifactError(f"there is no packaged drafter in {folder}", mend="`firesteel run RECIPE` makes one")
        _print(_commands(line, _untrained(line, str(folder)), _target_name(line, recipe.drafter.algorithm)))
        return
    loaded = load(folder)
    if loaded.contract is None:
        raise CheckpointError(f"{folder} has no contract", mend="`firesteel convert` with --target writes one")
    spec = get_spec(loaded.config.algorithm)
    reason = spec.unserved(loaded.config)
    if reason is not None:
        raise CheckpointError(f"the drafter in {folder}: {reason}", mend="serve it with Firesteel's own engine (--engine own), or train another")
    most = loaded.config.num_drafts
    if recipe.serve.tokens is not None and recipe.serve.tokens > most:
        raise RecipeError(f"serve.tokens={recipe.serve.tokens}, but the drafter drafts {most} a round", mend=f"set serve.tokens to at most {most}")
    warn_of_template(line, loaded.contract.template_options)
    speculative = speculative_config(loaded.config, loaded.contract, str(folder.absolute()))
    speculative["num_speculative_tokens"] = recipe.serve.tokens or loaded.contract.speculative_tokens
    named = _target_name(line, loaded.config.algorithm)
    if dry_run:
        _print(_commands(line, speculative, named))
        return
    engine = find_engine(recipe.serve, recipe.target.vllm)
    if engine.cpu and spec.second_runner(loaded.config):
        raise CheckpointError(
            f"the drafter in {folder}: vLLM's CPU build ({engine.distribution} {engine.version} of {engine.python}) cannot serve this {spec.title}, "
            "which needs vLLM's V2 model runner",
            mend="`--engine own` serves it here, and vLLM does on a GPU; the CPU build serves drafter.algorithm=dflash (all layers full or all sliding), "
            "eagle3 and peagle",
        )
    if recipe.serve.api_key is not None:
        line.screen.warn("serve: serve.api_key is the own engine's: this vLLM asks for no key; in production give it --api-key")
    if engine.version != TESTED_VLLM:
        line.screen.warn(f"serve: {engine.distribution} {engine.version}; Firesteel is tested with {TESTED_VLLM}")
    model = resolve_target(recipe.target)
    if spec.stitch:
        model = str(_stitched(line, folder, Path(model)))
    ask = held_out(line, folder, speculative["num_speculative_tokens"], needed=smoke)
    plan = plan_serving(engine, model, recipe.target, recipe.serve, speculative)
    leave_on_signals()
    place, started = line.folder / NAME, time.monotonic()
    line.screen.say(f"serve: starting {engine.distribution} {engine.version}; its log is {place / 'server.log'}")
    try:
        with Server(plan, place, recipe.serve.start_timeout) as server:
            line.screen.say(f"serve: up at {plan.url} after {time.monotonic() - started:.0f} s; asking {len(ask.prompts)} held-out prompts")
            found = smoke_check(
                plan.url,
                ask.prompts,
                ask.expected,
                max_new_tokens=ask.max_new_tokens,
                tolerance=recipe.serve.tolerance,
                timeout=recipe.serve.request_timeout,
            )
            _report(line, found, engine, _commands(line, speculative, named))
            checked = {**found.to_dict(), "engine": f"{engine.distribution} {engine.version}"}
            write_atomic(place / "smoke.json", json.dumps(checked, indent=1) + "\n")
            write_atomic(
                folder / DEPLOY,
                deploy_note(loaded.config, loaded.contract, shown_commands(recipe, speculative), checked, plain=plain_commands(recipe, speculative)),
            )
            if smoke:
                return
            line.screen.say(f"serve: ready at {plan.url}/v1; Ctrl-C stops it")
            server.wait()
    except FiresteelError:
        for text in tail(place / "server.log"):
            line.screen.say(f"  | {text}")
        raise


def warn_of_template(line: Line, trained: Mapping[str, bool | int | str]) -> None:
    """A drafter of answers with thinking accepts less of answers without, and the other way round."""
    told = line.recipe.target.template_options
    if told != trained:
        line.screen.warn(f"serve: target.template_options is {told}; the drafter learnt from answers under {dict(trained)}: expect less acceptance")


def _commands(line: Line, speculative: dict[str, Any], model: str) -> list[str]:
    return production_commands(model, line.recipe.target, line.recipe.serve, speculative)


def _print(commands: Sequence[str]) -> None:
    sys.stdout.write("\n".join(commands) + "\n")


def _target_name(line: Line, algorithm: str) -> str:
    """The target as a server's user names it, for a drafter of this kind."""
    name = line.recipe.target.model
    if get_spec(algorithm).stitch:
        return str(line.folder / NAME / _COPY)
    return resolve_target(line.recipe.target) if name.startswith("pypi:") else name


def _untrained(line: Line, model: str) -> dict[str, Any]:
    """The speculative config of a drafter that is not trained yet, from the recipe."""
    settings, spec = line.recipe.drafter, get_spec(line.recipe.drafter.algorithm)
    anchor = spec.sample_from_anchor if settings.sample_from_anchor is None else settings.sample_from_anchor
    tokens = line.recipe.serve.tokens or line.recipe.package.speculative_tokens or (settings.block_size if anchor else settings.block_size - 1)
    return {**({} if spec.stitch else {"model": model}), "method": spec.method, "num_speculative_tokens": tokens, **spec.serving}


def _stitched(line: Line, package: Path, target: Path) -> Path:
    """A copy of the target with this head in it; one that is there is used again where it was made of the same two."""
    out, note = line.folder / NAME / _COPY, line.folder / NAME / _COPY_OF
    # The contract names the weights by their hash. Of the target the place must do: hashing it would take as long as copying it.
    made_of = json.dumps({"contract": hash_file(package / CONTRACT), "target": str(target.absolute())}) + "\n"
    if (out / "config.json").is_file() and note.is_file() and note.read_text() == made_of:
        return out
    try:
        note.unlink(missing_ok=True)
        if out.exists():
            shutil.rmtree(out)
    except OSError as e:
        raise disk_error(e, out) from e
    stitch(package, target, out)
    write_atomic(note, made_of)
    return out


def held_out(line: Line, package: Path, tokens: int, *, needed: bool) -> HeldOut:
    """Prompts that were evaluated, with what was accepted on these very prompts; without an evaluation the contract's promise.

    Args:
        tokens: drafts a round.
        needed: refuse where nothing was measured; otherwise a warning says that any acceptance passes.

    Raises:
        DataError: there is no such prompt.
        VerificationError: nothing was measured for so many drafts a round.
    """
    recipe = line.recipe
    tokenizer = load_tokenizer(resolve_target(recipe.target), recipe.target)
    evaluated = _evaluated(package)
    if evaluated is not None:
        pairs, longest = evaluated
        chosen = spread(pairs, recipe.serve.prompts)
        expected = _expect([record for _, record in chosen], tokens)
        prompts = [prompt for prompt, _ in chosen]
    else:
        prompts, longest = spread(load_sources(recipe.prompts, "eval").prompts, recipe.serve.prompts), recipe.evaluate.max_new_tokens
        expected = _promised(line, package, tokens, needed)
    if not prompts:
        raise DataError("there is no held-out prompt to check the server with", mend="give one in prompts.sources with split: eval")
    return HeldOut([encode_prompt(tokenizer, p.history([]), p.tools, where=p.where) for p in prompts], expected, longest)


def _evaluated(package: Path) -> tuple[list[tuple[Prompt, RequestRecord]], int] | None:
    """Held-out prompts with their greedy records, and the longest answer; None where this folder was not evaluated."""
    root = package.parent
    try:
        asked, answers = open_artifact(root / "prompts", "prompts"), open_artifact(root / "evaluate", "evaluate")
        made = open_artifact(package, "package", verify=False)
    except ArtifactError:
        return None
    if answers.manifest.inputs.get("package") != made.manifest.content:
        return None
    drafter, main = describe(package)[0].algorithm, ""
    rows = [request_from_json(row["record"]) for row in read_metrics(answers / "requests.jsonl") if row["part"] == main]
    greedy = {r.prompt_key: r for r in rows if r.drafter == drafter and r.temperature == 0}
    pairs = [(p, greedy[p.key]) for p in prompts_stage.read_prompts(asked, "eval") if p.key in greedy]
    return (pairs, read_report(answers / "report.json")["run"]["max_new_tokens"]) if pairs else None


def _expect(records: Sequence[RequestRecord], tokens: int) -> Expectation:
    """Accepted per round on these answers; with fewer drafts a round, what the positions up to there add up to."""
    rates = [row.rate or 0.0 for row in position_rates(records).unconditional]
    rounds = sum(len(r.rounds) for r in records)
    # With fewer drafts rounds begin elsewhere, more of them where text is easy: what is added up here is the least to expect.
    length = 1 + (sum(r.accepted for r in records) / max(1, rounds) if tokens >= len(rates) else sum(rates[:tokens]))
    return Expectation(length, tokens, f"the same {len(records)} prompts by Firesteel's own engine", exact=tokens >= len(rates))


def _promised(line: Line, package: Path, tokens: int, needed: bool) -> Expectation:
    _, contract = describe(package)
    promise = None if contract is None else contract.promise
    if promise is None or promise.draft_length != tokens:
        if needed:
            measured = "" if promise is None else f"serve.tokens={promise.draft_length} is what was measured; or "
            raise VerificationError(
                f"nothing was measured for {tokens} drafts a round with the drafter in {package}: a check would pass at any acceptance",
                mend=f"{measured}serve the recipe of its run after `firesteel evaluate RECIPE`, which compares the same prompts",
            )
        line.screen.warn(f"serve: nothing was measured for {tokens} drafts a round on other prompts: any acceptance passes. Serve the run's recipe to compare")
        return Expectation(1.0, tokens, "nothing")
    return Expectation(promise.acceptance_length, tokens, promise.measured_on)


def _report(line: Line, found: Smoke, engine: Engine, commands: Sequence[str]) -> None:
    expected = found.expected
    line.screen.say(
        f"serve: acceptance length {found.acceptance_length:.3f} by the server's own counters ({found.counters.drafts} rounds, {found.prompts} prompts); "
        f"{expected.acceptance_length:.3f} measured on {expected.measured_on}"
    )
    if found.acceptance_length - 1 > (expected.acceptance_length - 1) * (1 + line.recipe.serve.tolerance) > 0 and not expected.exact:
        line.screen.warn("serve: it accepts more than was measured: the measurement is of another drafter, or its prompts were harder")
    line.screen.say("serve: what that is worth in tokens per second, `firesteel bench` measures: DEPLOY.md has the two servers to start")
    line.screen.say("in production:")
    for command in commands:
        line.screen.say(f"  {command}")
