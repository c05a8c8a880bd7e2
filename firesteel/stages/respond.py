"""Stage `responses`: the target answers the prompts, turn by turn, in batches; finished answers survive a kill."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firesteel.artifact import Artifact, ArtifactWriter, hash_file, write_atomic
from firesteel.endpoints.pool import RefusedError
from firesteel.errors import DataError, RecipeError
from firesteel.prompts.conversation import Message, Prompt
from firesteel.prompts.dropped import Dropped
from firesteel.prompts.parts import AnswerParts
from firesteel.prompts.template import AnsweredTurn, encode_prompt
from firesteel.responses.answers import Answered, answer_key, append_answers, find_answers_file, read_answers
from firesteel.responses.generate import Answer, Ask, Sampling
from firesteel.responses.generator import Generator
from firesteel.responses.served import SHORTER, Answers, Completions, run_conversations
from firesteel.stages import prompts as prompts_stage
from firesteel.stages.line import Bar, Line
from firesteel.stages.states import servers

NAME = "responses"
SPLITS = ("train", "validation")
_WORK = "answers.jsonl"
_REFUSED = "refused by the servers"


@dataclass
class _Job:
    prompt: Prompt
    sample: int
    key: str
    turns: list[AnsweredTurn] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [t.message() for t in self.turns]

    @property
    def finished(self) -> bool:
        return len(self.turns) == len(self.prompt.slots)


def run(line: Line) -> Artifact:
    """Answer every training and validation prompt (held-out ones are answered while they are measured)."""
    prompts = line.input("prompts")
    settings = {
        "responses": line.recipe.responses.model_dump(exclude={"batch_size", "answers", "engine", "servers"}),
        "seed": line.recipe.seed,
        "target": prompts_stage.target_identity(line),
    }
    if line.recipe.responses.answers is not None:
        file = find_answers_file(line.recipe.responses.answers)
        settings["answers"] = hash_file(file) if file.is_file() else None
    return line.stage(NAME, settings, {"prompts": prompts.manifest.content}, lambda writer: _make(line, writer, prompts), drop=(_WORK,))


def read_responses(artifact: Artifact, split: str) -> list[Answered]:
    """The answers of a split, in the order of its prompts."""
    return list(read_answers(artifact / f"{split}.jsonl").values())


def sampling_of(line: Line, split: str) -> Sampling:
    """The recipe's sampling for training; validation replays greedy decoding, so its answers are greedy whatever training's are."""
    r = line.recipe.responses
    return Sampling(r.max_new_tokens, r.temperature, r.top_p, r.top_k, line.recipe.seed) if split == "train" else Sampling(r.max_new_tokens)


def _make(line: Line, writer: ArtifactWriter, prompts: Artifact) -> dict[str, Any]:
    recipe = line.recipe.responses
    known = read_answers(writer / _WORK) if (writer / _WORK).is_file() else {}
    if recipe.answers is not None:
        known = {**read_answers(find_answers_file(recipe.answers)), **known}
    settings = prompts_stage.target_settings(line)
    told = [line.target.spec.fingerprint, settings["chat_template"], json.dumps(o, sort_keys=True) if (o := settings.get("template_options")) else None]
    identity = " ".join(t for t in told if t is not None)
    sampling = {split: sampling_of(line, split) for split in SPLITS}
    jobs: dict[str, list[_Job]] = {}
    for split in SPLITS:
        samples = recipe.samples if split == "train" else 1
        said = {k: v for k, v in vars(sampling[split]).items() if not (k == "seed" and sampling[split].temperature == 0)}
        jobs[split] = [_Job(p, s, answer_key(p, s, said, identity)) for p in prompts_stage.read_prompts(prompts, split) for s in range(samples)]
    # Validation promises what decoding must keep, token by token: its texts are those of the whole target.
    precisions = {split: recipe.precision if split == "train" else "float32" for split in SPLITS}
    missing = {s: [j for j in jobs[s] if (found := known.get(j.key)) is None or (found.half and precisions[s] == "float32")] for s in SPLITS}
    total, due = sum(map(len, jobs.values())), sum(map(len, missing.values()))
    if due < total:
        line.screen.say(f"responses: {total - due} of {total} answers are on file")
    dropped, refused = Dropped(), set[str]()
    if due:
        with line.screen.bar("answering", sum(len(j.prompt.slots) for found in missing.values() for j in found)) as bar:
            for split in SPLITS:
                if recipe.engine == "endpoints":
                    refused |= _answer_served(line, missing[split], sampling[split], known, writer / _WORK, bar, dropped)
                else:
                    _answer(line, missing[split], sampling[split], precisions[split], known, writer / _WORK, bar)
    for text in dropped.lines():
        line.screen.warn(f"responses: dropped: {text}; {SHORTER}")
    about: dict[str, Any] = {"target": line.target.spec.to_dict(), "dropped": dropped.to_dict()}
    for split in SPLITS:
        answers = [known[j.key] for j in jobs[split] if j.key not in refused]
        if not answers:
            raise DataError(f"no prompt of split {split} is answered; dropped: {'; '.join(dropped.lines())}", mend=SHORTER)
        write_atomic(writer / f"{split}.jsonl", "".join(json.dumps(a.to_row(), ensure_ascii=False) + "\n" for a in answers))
        about[split] = _summary(answers)
        line.screen.say(f"responses: {split}: {_sentence(about[split], recipe.max_new_tokens)}")
        if about[split]["tokens"] == 0:
            raise DataError(f"all {len(answers)} answers of split {split} are empty", mend="check target.chat_template: the target ends its turn at once")
    return about


def _answer(line: Line, jobs: list[_Job], sampling: Sampling, precision: str, known: dict[str, Answered], work: Path, bar: Bar) -> None:
    target = line.target
    generator, parts = Generator(target.model, line.recipe.responses.batch_size, precision), AnswerParts(target.tokenizer)
    made = turn = 0
    while waiting := [j for j in jobs if not j.finished]:
        asks = [Ask(f"{j.key}/{turn}", encode_prompt(target.tokenizer, j.prompt.history(j.messages), j.prompt.tools, where=j.prompt.where)) for j in waiting]

        def done(index: int, answer: Answer, waiting: list[_Job] = waiting, asks: list[Ask] = asks) -> None:
            nonlocal made
            job = waiting[index]
            job.turns.append(parts.turn(asks[index].token_ids, answer.token_ids, answer.finish_reason, job.prompt.tools))
            made += len(answer.token_ids)
            if job.finished:
                known[job.key] = Answered(job.key, job.prompt.key, job.sample, job.turns, generator.half)
                append_answers(work, [known[job.key]])
            bar.advance(1, f"{made} tokens")

        generator.run(asks, sampling, target.spec.eos_ids, done)
        turn += 1


def _answer_served(line: Line, jobs: list[_Job], sampling: Sampling, known: dict[str, Answered], work: Path, bar: Bar, dropped: Dropped) -> set[str]:
    """The same from servers: each conversation goes on by itself. One with a prompt that they refuse is dropped; returns the keys of these."""
    recipe, target, made = line.recipe, line.target, 0
    refused, parts = set[str](), AnswerParts(target.tokenizer)
    # Where the target's states come from vLLM, the server of `extract-server` answers, too.
    urls = recipe.responses.servers.urls or (servers(line) if recipe.target.engine == "vllm" else recipe.target.endpoints)
    if not urls:
        raise RecipeError("responses.engine=endpoints, but nobody is named to answer", mend="set responses.servers.urls=[http://HOST:PORT]")
    if not jobs:
        return refused

    async def talk(job: _Job, ask: Answers) -> None:
        nonlocal made
        while not job.finished:
            ids = encode_prompt(target.tokenizer, job.prompt.history(job.messages), job.prompt.tools, where=job.prompt.where)
            try:
                answer = await ask(Ask(f"{job.key}/{len(job.turns)}", ids))
            except RefusedError as e:
                refused.add(job.key)
                dropped.add(_REFUSED, f"{job.prompt.where}: {e.message}")
                bar.advance(len(job.prompt.slots) - len(job.turns))
                return
            job.turns.append(parts.turn(ids, answer.token_ids, answer.finish_reason, job.prompt.tools))
            made += len(answer.token_ids)
            bar.advance(1, f"{made} tokens")
        answered = Answered(job.key, job.prompt.key, job.sample, job.turns)
        append_answers(work, [answered])
        known[job.key] = answered

    def client() -> Completions:
        return Completions(recipe.responses.servers, sampling, target.spec.eos_ids, target.spec.vocab_size)

    run_conversations(jobs, talk, client, [u.rstrip("/") for u in urls], "answer")
    return refused


def _summary(answers: Sequence[Answered]) -> dict[str, Any]:
    turns = [t for a in answers for t in a.turns]
    return {
        "answers": len(answers),
        "turns": len(turns),
        "tokens": sum(len(t.token_ids) for t in turns),
        "finish_reasons": dict(Counter(t.finish_reason for t in turns)),
    }


def _sentence(summary: dict[str, Any], most: int) -> str:
    """Cut answers are said as such, with their share: they end nowhere, and a drafter learns no end from them."""
    cut, turns = summary["finish_reasons"].get("length", 0), summary["turns"]
    reasons = ", ".join(f"{n} {r}" for r, n in sorted(summary["finish_reasons"].items()))
    share = f" ({cut / turns:.0%} cut at responses.max_new_tokens={most})" if cut else ""
    return f"{summary['answers']} answers, {summary['tokens']} tokens, finish reasons: {reasons}{share}"
