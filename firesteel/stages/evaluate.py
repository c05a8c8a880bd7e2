"""Stage `evaluate`: acceptance and speed on held-out prompts, and the report.

Everything runs from the exported folder, loaded anew. Answers that were measured are appended as they come, so that a killed
evaluation goes on where it was. Speed is measured against plain decoding by the same engine, prompt by prompt in alternation.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from firesteel.artifact import Artifact, ArtifactWriter, write_atomic
from firesteel.batches.anchors import seeded
from firesteel.decoding.decode import Decoded, decode_plain, decode_speculative
from firesteel.decoding.lengths import StepCosts, best_length, measure_costs
from firesteel.errors import DataError, TemplateError
from firesteel.evaluation.acceptance import position_rates, select_greedy
from firesteel.evaluation.html import write_report
from firesteel.evaluation.machine import usable_cores
from firesteel.evaluation.records import PLAIN, RequestRecord, RoundRecord, SpeedRecord, request_from_json, speed_from_json
from firesteel.evaluation.report import build_report, headline, model_card_numbers, read_report
from firesteel.evaluation.schema import SCHEMA_VERSION, Agreement, Cost
from firesteel.package.export import WEIGHTS
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.dropped import Dropped
from firesteel.prompts.parts import AnswerParts
from firesteel.prompts.template import AnsweredTurn, encode_prompt
from firesteel.responses.answers import cut_torn_line
from firesteel.stages import package as package_stage
from firesteel.stages import prompts as prompts_stage
from firesteel.stages import train as train_stage
from firesteel.stages.checkpoints import each_checkpoint, hash_checkpoints
from firesteel.stages.configure import algorithms
from firesteel.stages.extra import hash_extra, read_extra
from firesteel.stages.line import Line
from firesteel.stages.prompts import spread_domains
from firesteel.stages.report_facts import calibration_facts, notes_of, run_facts, stage_seconds, training_facts
from firesteel.stages.runtime import Runtime, open_package, open_trained, session_length
from firesteel.training.metrics import read_metrics

NAME = "evaluate"
_REQUESTS, _SPEEDS, _MAIN = "requests.jsonl", "speeds.jsonl", ""
_ALL_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 15)
_COST_REPEATS = 9


def run(line: Line) -> Artifact:
    """Measure and report; `report.json` and `report.html` are also copied to the run's folder."""
    package, calibration, prompts = line.input("package"), line.input("calibrate"), line.input("prompts")
    others = {name: line.input(train_stage.artifact_name(line, name)) for name in algorithms(line)[1:]}
    inputs = {"package": package.manifest.content, "calibrate": calibration.manifest.content, "prompts": prompts.manifest.content}
    inputs |= {name: artifact.manifest.content for name, artifact in others.items()}
    settings = {
        "evaluate": line.recipe.evaluate.model_dump(),
        "extra": hash_extra(line.recipe.evaluate.extra),
        "checkpoints": hash_checkpoints(line),
        "bins": line.recipe.calibrate.bins,
        "report": SCHEMA_VERSION,
        "seed": line.recipe.seed,
        "target": prompts_stage.target_settings(line),
    }
    artifact = line.stage(NAME, settings, inputs, lambda writer: _Evaluation(line, writer).run(package, calibration, prompts))
    if line.world.first:
        for name in ("report.json", "report.html"):
            shutil.copyfile(artifact / name, line.folder / name)
        package_stage.write_card(line, package, model_card_numbers(read_report(artifact / "report.json")))
    line.world.wait()
    return artifact


def show(line: Line) -> None:
    """Print the headline of the report and where it lies."""
    data = read_report(line.folder / "report.json")
    line.screen.say(headline(data))
    line.screen.say(f"report: {line.folder / 'report.html'}   numbers: {line.folder / 'report.json'}   checkpoint: {line.folder / 'package'}")


class _Evaluation:
    def __init__(self, line: Line, writer: ArtifactWriter) -> None:
        self.line, self.writer, self.settings = line, writer, line.recipe.evaluate
        self.eos, self.parts = line.target.spec.eos_ids, AnswerParts(line.target.tokenizer)
        self.started = time.time()
        self.left_out: dict[tuple[str, str], tuple[str, str]] = {}  # by part and prompt: why, and where the prompt comes from

    def run(self, package: Artifact, calibration: Artifact, prompts: Artifact) -> dict[str, Any]:
        line = self.line
        name = line.recipe.drafter.algorithm
        sets = {s.name: read_extra(s) for s in self.settings.extra}
        runtime = open_package(line, package.path)
        runtimes = {name: runtime} | {other: open_trained(line, other) for other in algorithms(line)[1:]}
        runtimes |= each_checkpoint(line, lambda folder: open_package(line, folder))
        chosen = per_domain(prompts_stage.read_prompts(prompts, "eval"), self.settings.prompts_per_domain)
        requests = [r for drafter, own in runtimes.items() for t in self.settings.temperatures for r in self._answers(own, drafter, chosen, t, _MAIN)]
        extra = {
            part: [r for drafter, own in runtimes.items() for r in self._answers(own, drafter, loaded.prompts, self.settings.temperatures[0], part)]
            for part, loaded in sets.items()
        }
        dropped = Dropped()
        for why, where in self.left_out.values():
            dropped.add(why, where)
        for loaded in sets.values():
            dropped.merge(loaded.dropped)
        for text in dropped.lines():
            line.screen.say(f"evaluate: left out: {text}")
        if not requests:
            raise DataError(f"no held-out prompt can be answered; left out: {'; '.join(dropped.lines())}", mend="lower evaluate.max_new_tokens")
        about = self._report(name, package, calibration, runtimes, chosen, requests, extra, dropped) if line.world.first else {}
        return line.world.tell(about)

    def _report(
        self,
        name: str,
        package: Artifact,
        calibration: Artifact,
        runtimes: dict[str, Runtime],
        chosen: Sequence[Prompt],
        requests: Sequence[RequestRecord],
        extra: dict[str, list[RequestRecord]],
        dropped: Dropped,
    ) -> dict[str, Any]:
        """The first process's work, while the others wait and leave it the machine: speed, and everything written down."""
        line = self.line
        answered = {r.prompt_key for r in requests}
        chosen = [p for p in chosen if p.key in answered]
        gather_requests(self.writer.path)
        if line.world.size > 1:  # torchrun gives a process one thread; from here on the machine is this one's
            torch.set_num_threads(line.recipe.target.threads or usable_cores())
        # Each drafter at the length that pays best for it: a chain's drafts cost more the more there are, a block's do not.
        timed = runtimes if self.settings.speed_prompts else {}
        # Speed is measured greedily, and warm answers accept less.
        greedy = {n: select_greedy(requests, drafter=n, otherwise=self.settings.temperatures[0]) for n in timed}
        measured = {n: self._costs(r, n, greedy[n], chosen) for n, r in timed.items()}
        lengths = {n: tokens for n, (_, tokens) in measured.items()}
        speeds: list[SpeedRecord] = []
        agreement: Agreement | None = None
        if lengths:
            speeds, agreement = self._speeds(runtimes, chosen, lengths)
        seconds = stage_seconds(line) | {NAME: time.time() - self.started}
        stored = {name: package.path} | {n: Path(folder).expanduser() for n, folder in self.settings.checkpoints.items()}
        report = build_report(
            run=run_facts(line),
            requests=requests,
            speeds=speeds,
            draft_lengths=lengths,
            agreement=agreement,
            costs=measured[name][0] if measured else [],
            calibration=calibration_facts(calibration),
            bins=line.recipe.calibrate.bins,
            thresholds=self.settings.confidence_thresholds,
            extra=extra,
            training={n: training_facts(line.input(train_stage.artifact_name(line, n))) for n in algorithms(line)},
            parameters={n: sum(p.numel() for p in r.drafter.parameters()) for n, r in runtimes.items()},
            file_bytes={n: (folder / WEIGHTS).stat().st_size for n, folder in stored.items()},
            seconds_total=sum(seconds.values()),
            stage_seconds=seconds,
            notes=notes_of(line, agreement, dropped),
        )
        write_report(report, self.writer.path)
        al, speedup = report["acceptance_length"], report["speedup"]
        return {"acceptance_length": al and al["pooled"], "speedup": speedup and speedup["pooled"], "dropped": dropped.to_dict()}

    def _answers(self, runtime: Runtime, drafter: str, prompts: Sequence[Prompt], temperature: float, part: str) -> list[RequestRecord]:
        """One record per answer due, dealt out to all processes; what a killed evaluation measured is kept."""
        world, folder = self.line.world, self.writer.path
        path = folder / (_REQUESTS if world.first else f"requests-{world.rank}.jsonl")
        done: dict[tuple[str, ...], RequestRecord] = {}
        for row in (row for file in _request_files(folder) for row in read_metrics(file)):
            record = request_from_json(row["record"])
            done[row["part"], record.drafter, str(record.temperature), record.prompt_key] = record
        world.wait()  # nobody appends to what others still read
        cut_torn_line(path)
        answered: list[tuple[list[RequestRecord], str | None]] = []  # of each prompt, and why its answers end before the last that is due
        label = f"{drafter} at temperature {temperature:g}" + (f" on {part}" if part else "")
        mine = prompts[world.rank :: world.size]
        with self.line.screen.bar(label, sum(len(p.slots) for p in mine)) as bar, path.open("a") as file:
            for prompt in mine:
                due = len(prompt.slots)
                known = [done.get((part, drafter, str(temperature), _of_turn(prompt.key, n))) for n in range(due)]
                if all(known):
                    answered.append(([k for k in known if k is not None], None))
                    bar.advance(due)
                    continue
                records: list[RequestRecord] = []
                turns: list[AnsweredTurn] = []
                why: str | None = None
                for n in range(due):
                    prompt_ids = self._encode(runtime, prompt, turns)
                    if isinstance(prompt_ids, str):
                        why = prompt_ids
                        bar.advance(due - n)
                        break
                    generator = seeded(self.line.recipe.seed, int(prompt.key[:12], 16), n)
                    found = self._speculative(runtime, prompt_ids, runtime.num_drafts, temperature, generator)
                    turns.append(self.parts.turn(prompt_ids, found.tokens, found.finish_reason, prompt.tools))
                    records.append(_record(prompt, n, drafter, temperature, found))
                    file.write(json.dumps({"step": 0, "part": part, "record": asdict(records[-1])}) + "\n")
                    file.flush()
                    bar.advance(1, f"{sum(len(r) for r, _ in answered) + len(records)} answers")
                answered.append((records, why))
        found_by_all = world.collect(answered)
        for prompt, (_, reason) in zip(prompts, found_by_all, strict=True):
            if reason is not None:
                self.left_out.setdefault((part, prompt.key), (reason, prompt.where))
        return [record for records, _ in found_by_all for record in records]

    def _encode(self, runtime: Runtime, prompt: Prompt, turns: Sequence[AnsweredTurn]) -> list[int] | str:
        """What the target is given for the next answer; or why there can be none, and so none after it."""
        try:
            ids = encode_prompt(self.line.target.tokenizer, prompt.history([t.message() for t in turns]), prompt.tools, where=prompt.where)
        except TemplateError as e:
            return "refused by the chat template: " + e.message.rsplit("): ", 1)[-1]
        most = session_length(self.line)
        # Costs are measured with whole drafts, also where answers are shorter.
        if len(ids) + max(self.settings.max_new_tokens, runtime.num_drafts + 2) - 1 > most:
            return f"longer than {most} positions with evaluate.max_new_tokens={self.settings.max_new_tokens} (this turn, and so all after it)"
        return ids

    def _speculative(self, runtime: Runtime, prompt_ids: list[int], length: int, temperature: float, generator: torch.Generator | None) -> Decoded:
        return decode_speculative(
            runtime.target,
            runtime.session,
            prompt_ids,
            draft_tokens=length,
            max_new_tokens=self.settings.max_new_tokens,
            eos_ids=self.eos,
            temperature=temperature,
            generator=generator,
            rejection=self.settings.rejection,
        )

    def _costs(self, runtime: Runtime, name: str, requests: Sequence[RequestRecord], prompts: Sequence[Prompt]) -> tuple[list[Cost], int]:
        """Milliseconds per verification length, and the length that they favour. Of lengths that the recipe names a drafter tries those that it can draft."""
        wanted = [n for n in self.settings.draft_lengths or _ALL_LENGTHS if n <= runtime.num_drafts] or [runtime.num_drafts]
        prompt_ids = encode_prompt(self.line.target.tokenizer, prompts[0].history([]), prompts[0].tools, where=prompts[0].where)
        measured: StepCosts = measure_costs(runtime.target, runtime.session, prompt_ids, wanted, repeats=_COST_REPEATS)
        rates = [p.rate or 0.0 for p in position_rates(requests).unconditional]
        choice = best_length(measured, rates + [0.0] * (runtime.num_drafts - len(rates)))
        self.line.screen.say(f"evaluate: {name}: {choice.tokens} drafts per round pay best here (expected {choice.speedup:.2f} times plain decoding)")
        rows = [Cost(length=0, verify_ms=measured.plain_ms, draft_ms=None)]
        rows += [Cost(length=n, verify_ms=measured.verify_ms[n], draft_ms=measured.draft_ms[n]) for n in wanted]
        return rows, choice.tokens

    def _speeds(self, runtimes: dict[str, Runtime], prompts: Sequence[Prompt], lengths: dict[str, int]) -> tuple[list[SpeedRecord], Agreement]:
        """Plain and drafted decoding of the same prompts in alternation, greedily; and whether both wrote the same."""
        path = self.writer / _SPEEDS
        path.unlink(missing_ok=True)  # a half measured under another load is not continued
        chosen = spread_domains(prompts, self.settings.speed_prompts)
        records: list[SpeedRecord] = []
        compared = differing = 0
        with self.line.screen.bar("measuring speed", len(chosen) * self.settings.speed_repeats) as bar:
            for repeat in range(self.settings.speed_repeats):
                for number, prompt in enumerate(chosen):
                    ids = encode_prompt(self.line.target.tokenizer, prompt.history([]), prompt.tools, where=prompt.where)
                    arms: list[tuple[str, Callable[[], Decoded]]] = [(PLAIN, lambda ids=ids: self._plain(runtimes, ids))]  # type: ignore[misc]
                    arms += [(n, lambda n=n, r=r, ids=ids: self._speculative(r, ids, lengths[n], 0.0, None)) for n, r in runtimes.items()]  # type: ignore[misc]
                    found = {name: work() for name, work in (arms if (repeat + number) % 2 == 0 else arms[::-1])}
                    compared += len(runtimes)
                    differing += sum(d.tokens != found[PLAIN].tokens for d in found.values())
                    records += [_speed(prompt, name, repeat, lengths.get(name, 0), d) for name, d in found.items()]
                    bar.advance()
        if differing:
            self.line.screen.warn(f"evaluate: {differing} drafted answers differ from plain decoding (rounding decides ties in float arithmetic)")
        path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in records))
        return [speed_from_json(asdict(r)) for r in records], Agreement(compared=compared, differing=differing)

    def _plain(self, runtimes: dict[str, Runtime], ids: list[int]) -> Decoded:
        target = next(iter(runtimes.values())).target
        return decode_plain(target, ids, max_new_tokens=self.settings.max_new_tokens, eos_ids=self.eos)


def _request_files(folder: Path) -> list[Path]:
    """Records of all processes, also of those that a killed evaluation had."""
    return sorted(folder.glob("requests*.jsonl"))


def gather_requests(folder: Path) -> None:
    """What several processes wrote, in one file: each record once, whatever a kill left."""
    files = _request_files(folder)
    rows = {json.dumps(row, sort_keys=True): None for path in files for row in read_metrics(path)}
    write_atomic(folder / _REQUESTS, "".join(row + "\n" for row in rows))
    for path in files:
        if path.name != _REQUESTS:
            path.unlink()


def _of_turn(name: str, turn: int) -> str:
    """Id or key of a prompt's answer number `turn`."""
    return name if turn == 0 else f"{name}/{turn + 1}"


def _record(prompt: Prompt, turn: int, drafter: str, temperature: float, found: Decoded) -> RequestRecord:
    rounds = [RoundRecord(r.drafted, r.accepted, None if r.confidences is None else r.confidences[: r.drafted]) for r in found.rounds]
    name, key = _of_turn(prompt.id, turn), _of_turn(prompt.key, turn)
    return RequestRecord(prompt.domain, name, drafter, temperature, len(found.tokens), found.finish_reason, rounds, key)


def _speed(prompt: Prompt, arm: str, repeat: int, length: int, found: Decoded) -> SpeedRecord:
    return SpeedRecord(prompt.id, prompt.domain, arm, repeat, length, len(found.tokens), found.seconds_prefill, found.seconds_decode, prompt.key)


def per_domain(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of each domain; all where there is no limit."""
    counts: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
        if limit is None or counts[prompt.domain] <= limit:
            chosen.append(prompt)
    return chosen
