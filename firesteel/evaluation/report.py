"""The report: all records of a run, as one JSON object with a fixed schema (`schema`, explained in docs/report.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from firesteel.artifact import write_atomic
from firesteel.errors import ArtifactError, DataError
from firesteel.evaluation.acceptance import acceptance_length, by_domain, compare_drafters, finish_reasons, position_rates, select
from firesteel.evaluation.calibration import measure_confidence, threshold_sweep
from firesteel.evaluation.records import RequestRecord, SpeedRecord
from firesteel.evaluation.schema import (
    SCHEMA_VERSION,
    AcceptanceLength,
    Agreement,
    Calibration,
    Comparison,
    Cost,
    Domain,
    Drafter,
    ExtraSet,
    Report,
    Run,
    Speed,
    TemperatureRow,
    Training,
)
from firesteel.evaluation.speed import speed, speed_by_length, speed_of_domain


def build_report(
    *,
    run: Run,
    requests: Sequence[RequestRecord],
    speeds: Sequence[SpeedRecord],
    draft_lengths: Mapping[str, int],
    agreement: Agreement | None,
    costs: Sequence[Cost],
    calibration: Calibration | None,
    bins: int,
    thresholds: Sequence[float],
    extra: Mapping[str, Sequence[RequestRecord]],
    training: Mapping[str, Training],
    parameters: Mapping[str, int],
    file_bytes: Mapping[str, int],
    seconds_total: float | None,
    stage_seconds: Mapping[str, float],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Everything a reader wants to know of a run.

    Args:
        run: where the numbers come from; `run.drafter` and `run.temperature` choose the headline, `run.bootstrap` and
            `run.seed` its intervals.
        requests: answers to the held-out prompts, by all drafters at all temperatures.
        speeds: timed answers; empty where speed was not measured.
        draft_lengths: by drafter, the draft length of its headline speed-up, chosen otherwise than from these timings; a drafter without one has no
            headline speed-up.
        agreement: how many of the timed answers differ from plain ones; None where none were timed.
        costs: milliseconds per verification length.
        calibration: of the headline drafter; None without a confidence head.
        bins: of the calibration error of the answers' confidences.
        thresholds: of the confidence sweep.
        extra: more prompt sets by name, answered at the headline temperature.
        training, parameters, file_bytes: by drafter.
        stage_seconds: wall clock of every stage.
        notes: what to expect from a bigger budget, and other remarks, one paragraph each.

    Returns:
        `report.json` as plain JSON types.

    Raises:
        DataError: the headline has no requests, or its draft length is missing although its speed was measured.
    """
    head = select(requests, drafter=run.drafter, temperature=run.temperature)
    if not head:
        raise DataError(
            f"no answers by drafter {run.drafter!r} at temperature {run.temperature}",
            mend="evaluate.temperatures must hold the headline temperature first, and evaluation needs at least one held-out prompt",
        )
    if run.drafter not in draft_lengths and any(r.arm == run.drafter for r in speeds):
        raise DataError(f"the speed of {run.drafter!r} was measured, but the draft length of its headline is missing")
    drafters = _in_order([run.drafter, *(r.drafter for r in requests)])
    at_head = {d: select(requests, drafter=d, temperature=run.temperature) for d in drafters}
    blocks = {d: _drafter(d, at_head[d], speeds, draft_lengths, parameters, file_bytes, bins, run) for d in drafters}
    report = Report(
        schema_version=SCHEMA_VERSION,
        run=run,
        acceptance_length=blocks[run.drafter].acceptance_length,
        speedup=blocks[run.drafter].speedup,
        agreement=agreement,
        finish_reasons=finish_reasons(head),
        domains={name: _domain(name, at_head, speeds, draft_lengths, run) for name in by_domain(head)},
        positions=blocks[run.drafter].positions,
        drafters=blocks,
        comparisons=_comparisons(at_head, run),
        temperatures=[
            TemperatureRow(temperature=t, drafter=d, acceptance_length=_acceptance(select(requests, drafter=d, temperature=t), run))
            for t in sorted({r.temperature for r in requests})
            for d in drafters
            if select(requests, drafter=d, temperature=t)
        ],
        calibration=calibration,
        confidence=blocks[run.drafter].confidence,
        sweep=threshold_sweep(head, thresholds),
        costs=sorted(costs, key=lambda c: c.length),
        extra={name: _extra(rows, run) for name, rows in extra.items()},
        training=dict(training),
        seconds_total=seconds_total,
        stage_seconds=dict(stage_seconds),
        notes=list(notes),
    )
    return report.model_dump(mode="json")


def parse_report(data: Mapping[str, Any]) -> Report:
    """A report as typed parts.

    Raises:
        ArtifactError: it does not follow the schema of this version.
    """
    found = data.get("schema_version")
    if found != SCHEMA_VERSION:
        raise ArtifactError(f"the report has schema version {found}, this Firesteel reads {SCHEMA_VERSION}", mend="run `firesteel evaluate RECIPE` again")
    try:
        return Report.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise ArtifactError(f"the report is not valid at {where}: {first['msg']}", mend="run `firesteel evaluate RECIPE` again") from None


def read_report(path: Path) -> dict[str, Any]:
    """Read and check `report.json`.

    Raises:
        ArtifactError: missing, not JSON, or not of this schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ArtifactError(f"cannot read {path}: {e.strerror}", mend="run `firesteel evaluate RECIPE` first") from None
    except ValueError as e:
        raise ArtifactError(f"{path} is not JSON: {e}", mend="run `firesteel evaluate RECIPE` again") from None
    if not isinstance(data, dict):
        raise ArtifactError(f"{path} holds a {type(data).__name__}, not a report", mend="run `firesteel evaluate RECIPE` again")
    parse_report(data)
    return data


def write_report_json(data: Mapping[str, Any], path: Path) -> None:
    """Check a report against the schema and write it."""
    parse_report(data)
    write_atomic(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def model_card_numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    """The few numbers that a model card shows; what was not measured is None."""
    report = parse_report(data)
    al, fast, cal, met = report.acceptance_length, report.speedup, report.calibration, report.confidence
    return {
        "drafter": report.run.drafter,
        "target": report.run.target.name,
        "temperature": report.run.temperature,
        "acceptance_length": al.pooled if al else None,
        "acceptance_length_interval": list(al.interval) if al and al.interval else None,
        "acceptance_length_mean_of_requests": al.mean_of_requests if al else None,
        "draft_length": al.draft_length if al else None,
        "requests": al.requests if al else None,
        "acceptance_length_by_domain": {n: d.acceptance_length.pooled if d.acceptance_length else None for n, d in report.domains.items()},
        "acceptance_per_position": [p.rate for p in report.positions.unconditional],
        "speedup": fast.pooled if fast else None,
        "speedup_interval": list(fast.interval) if fast and fast.interval else None,
        "speedup_draft_length": fast.draft_length if fast else None,
        "tokens_per_second_plain": fast.plain_tokens_per_second if fast else None,
        "tokens_per_second_drafted": fast.drafted_tokens_per_second if fast else None,
        "ece_before": cal.ece_before if cal else None,
        "ece_after": cal.ece_after if cal else None,
        "auc_before": cal.auc_before if cal else None,
        "auc_after": cal.auc_after if cal else None,
        "ece_held_out": met.ece if met else None,
        "auc_held_out": met.auc if met else None,
        "ece_held_out_per_position": [p.ece for p in met.positions] if met else None,
        "auc_held_out_per_position": [p.auc for p in met.positions] if met else None,
        "machine": report.run.machine.cpu,
        "cores": report.run.machine.cores,
        "date": report.run.date,
    }


def headline(data: Mapping[str, Any]) -> str:
    """What the run means, in a sentence or two for someone who does not know the terms."""
    report = parse_report(data)
    al, fast = report.acceptance_length, report.speedup
    if al is None:
        return "No answer was long enough to measure acceptance."
    text = f"On held-out prompts, one step of the target yields {al.pooled:.2f} tokens instead of 1"
    if fast is None:
        return f"{text}. Speed was not measured."
    pace = f"{fast.drafted_tokens_per_second:.1f} instead of {fast.plain_tokens_per_second:.1f} tokens per second"
    if fast.interval is not None and fast.interval[0] <= 1 <= fast.interval[1]:
        return f"{text}; on this machine decoding is about as fast as without the drafter ({pace}; the difference is within the error of measurement)."
    slower = ", that is slower," if fast.pooled < 1 else ""
    return f"{text}; on this machine decoding is {fast.pooled:.2f} times as fast{slower} as without the drafter ({pace})."


def _drafter(
    name: str,
    rows: Sequence[RequestRecord],
    speeds: Sequence[SpeedRecord],
    draft_lengths: Mapping[str, int],
    parameters: Mapping[str, int],
    file_bytes: Mapping[str, int],
    bins: int,
    run: Run,
) -> Drafter:
    return Drafter(
        acceptance_length=_acceptance(rows, run),
        positions=position_rates(rows),
        confidence=measure_confidence(rows, bins=bins),
        speedup=_speed(name, speeds, draft_lengths, run),
        speed_by_length=speed_by_length(speeds, drafter=name, resamples=run.bootstrap, seed=run.seed),
        parameters=parameters.get(name),
        file_bytes=file_bytes.get(name),
    )


def _domain(name: str, at_head: Mapping[str, Sequence[RequestRecord]], speeds: Sequence[SpeedRecord], draft_lengths: Mapping[str, int], run: Run) -> Domain:
    rows = {d: [r for r in found if r.domain == name] for d, found in at_head.items()}
    own, timed = rows[run.drafter], speed_of_domain(speeds, name)
    return Domain(
        requests=len(own),
        new_tokens=sum(r.new_tokens for r in own),
        finish_reasons=finish_reasons(own),
        acceptance_length=_acceptance(own, run),
        by_drafter=_acceptances(rows, run),
        positions=position_rates(own),
        speed=_speed(run.drafter, timed, draft_lengths, run),
    )


def _speed(drafter: str, speeds: Sequence[SpeedRecord], draft_lengths: Mapping[str, int], run: Run) -> Speed | None:
    if drafter not in draft_lengths:
        return None
    return speed(speeds, drafter=drafter, draft_length=draft_lengths[drafter], resamples=run.bootstrap, seed=run.seed)


def _extra(requests: Sequence[RequestRecord], run: Run) -> ExtraSet:
    drafters = _in_order([run.drafter, *(r.drafter for r in requests)])
    rows = {d: select(requests, drafter=d, temperature=run.temperature) for d in drafters}
    own = rows[run.drafter]
    return ExtraSet(
        requests=len(own),
        new_tokens=sum(r.new_tokens for r in own),
        finish_reasons=finish_reasons(own),
        by_drafter=_acceptances(rows, run),
        positions=position_rates(own),
    )


def _comparisons(at_head: Mapping[str, Sequence[RequestRecord]], run: Run) -> list[Comparison]:
    others = [rows for name, rows in at_head.items() if name != run.drafter and rows]
    found = [compare_drafters(at_head[run.drafter], rows, resamples=run.bootstrap, seed=run.seed) for rows in others]
    return [c for c in found if c is not None]


def _acceptance(requests: Sequence[RequestRecord], run: Run) -> AcceptanceLength | None:
    return acceptance_length(requests, resamples=run.bootstrap, seed=run.seed)


def _acceptances(rows: Mapping[str, Sequence[RequestRecord]], run: Run) -> dict[str, AcceptanceLength]:
    found = {name: _acceptance(r, run) for name, r in rows.items()}
    return {name: a for name, a in found.items() if a is not None}


def _in_order(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
