"""The report holds what its records say, in a schema that cannot drift unseen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from synthetic_run import DOMAINS, make_requests, make_run, make_speeds

from firesteel.errors import ArtifactError, DataError
from firesteel.evaluation.acceptance import acceptance_length, position_rates, select
from firesteel.evaluation.calibration import measure_confidence
from firesteel.evaluation.machine import machine_facts
from firesteel.evaluation.records import RequestRecord, SpeedRecord
from firesteel.evaluation.report import build_report, headline, model_card_numbers, parse_report, read_report, write_report_json
from firesteel.evaluation.schema import SCHEMA_VERSION, Report

DOCS = Path(__file__).parents[2] / "docs" / "report.md"

# What each version of the schema consists of. A change of the schema needs a new version, a new line here and a new docs/report.md.
FINGERPRINTS = {1: "bd69ad416bcac050", 2: "17fd467cab2b2465", 3: "20fc42634650c11f"}


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for kind in parts_of(field.annotation):
            yield from models(kind)


def parts_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from parts_of(inner)


def small(requests: list[RequestRecord], speeds: list[SpeedRecord], lengths: dict[str, int]) -> dict[str, Any]:
    return build_report(
        run=make_run(),
        requests=requests,
        speeds=speeds,
        draft_lengths=lengths,
        agreement=None,
        costs=[],
        calibration=None,
        bins=15,
        thresholds=[],
        extra={},
        training={},
        parameters={},
        file_bytes={},
        seconds_total=None,
        stage_seconds={},
        notes=[],
    )


def test_schema_does_not_change_within_a_version() -> None:
    shape = {m.__name__: {n: str(f.annotation) for n, f in m.model_fields.items()} for m in models(Report)}
    found = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
    assert FINGERPRINTS[SCHEMA_VERSION] == found, "the schema changed: raise SCHEMA_VERSION, add its fingerprint here, update docs/report.md"


def test_every_key_is_documented() -> None:
    text = DOCS.read_text()
    keys = {name for m in models(Report) for name in m.model_fields}
    assert {k for k in keys if f"`{k}" not in text and f"_{k}`" not in text} == set()


def test_no_key_has_a_default() -> None:
    # A default would let a report go without the key.
    assert [(m.__name__, n) for m in models(Report) for n, f in m.model_fields.items() if not f.is_required()] == []


def test_headline_numbers_are_those_of_the_records(full_report: dict[str, Any]) -> None:
    requests = make_requests(1, prompts=6, drafters={"dspark": (0.0, 8), "dflash": (-0.1, 7)}, temperatures=[0.0, 1.0])
    head = select(requests, drafter="dspark", temperature=0.0)
    rounds = [r for q in head for r in q.rounds]
    found = full_report["acceptance_length"]
    assert found["pooled"] == pytest.approx(1 + sum(r.accepted for r in rounds) / len(rounds))
    assert found == json.loads(acceptance_length(head, resamples=400, seed=0).model_dump_json())  # type: ignore[union-attr]
    assert found == full_report["drafters"]["dspark"]["acceptance_length"]
    assert list(full_report["domains"]) == DOMAINS
    assert sum(d["acceptance_length"]["rounds"] for d in full_report["domains"].values()) == found["rounds"]
    assert sum(d["requests"] for d in full_report["domains"].values()) == len(head) == sum(full_report["finish_reasons"].values())
    assert full_report["positions"]["unconditional"][0]["of"] == len(rounds)
    for name, domain in full_report["domains"].items():
        assert domain["positions"] == position_rates([r for r in head if r.domain == name]).model_dump(mode="json")
    own = make_requests(5, prompts=1, drafters={"dspark": (-0.05, 8), "dflash": (-0.12, 7)}, temperatures=[0.0])
    assert full_report["extra"]["my-support-tickets"]["positions"] == position_rates(select(own, drafter="dspark", temperature=0.0)).model_dump(mode="json")
    assert full_report["confidence"] == full_report["drafters"]["dspark"]["confidence"]
    assert full_report["confidence"] == measure_confidence(head, bins=15).model_dump(mode="json")  # type: ignore[union-attr]
    assert full_report["drafters"]["dflash"]["confidence"] is None
    # At threshold 0 everything is verified: the sweep must return the headline.
    assert full_report["sweep"][0]["acceptance_length"] == pytest.approx(found["pooled"])
    assert [(t["temperature"], t["drafter"]) for t in full_report["temperatures"]] == [(0, "dspark"), (0, "dflash"), (1, "dspark"), (1, "dflash")]
    assert set(full_report["extra"]["my-support-tickets"]["by_drafter"]) == {"dspark", "dflash"}


def test_speed_and_comparison(full_report: dict[str, Any]) -> None:
    assert full_report["agreement"] == {"compared": 90, "differing": 1}
    assert full_report["speedup"]["draft_length"] == 4
    assert full_report["speedup"] in full_report["drafters"]["dspark"]["speed_by_length"]
    assert [s["draft_length"] for s in full_report["drafters"]["dflash"]["speed_by_length"]] == [2, 4, 7]
    assert full_report["domains"]["code"]["speed"]["prompts"] == 1
    (comparison,) = full_report["comparisons"]
    assert (comparison["first"], comparison["second"], comparison["prompts"]) == ("dspark", "dflash", 54)
    assert comparison["ratio"] == pytest.approx(full_report["acceptance_length"]["pooled"] / full_report["drafters"]["dflash"]["acceptance_length"]["pooled"])


def test_what_was_not_measured_is_null(bare_report: dict[str, Any]) -> None:
    assert bare_report["speedup"] is None
    assert bare_report["agreement"] is None
    assert bare_report["calibration"] is None
    assert bare_report["confidence"] is None
    assert bare_report["sweep"] == []
    assert bare_report["seconds_total"] is None
    assert all(d["speed"] is None and d["acceptance_length"]["interval"] is None for d in bare_report["domains"].values())
    card = model_card_numbers(bare_report)
    assert card["speedup"] is None
    assert card["ece_after"] is None
    assert headline(bare_report).endswith("Speed was not measured.")


def test_model_card_numbers(full_report: dict[str, Any]) -> None:
    card = model_card_numbers(full_report)
    assert card["acceptance_length"] == full_report["acceptance_length"]["pooled"]
    assert card["acceptance_length_interval"] == full_report["acceptance_length"]["interval"]
    assert card["acceptance_length_by_domain"]["tool_call"] == full_report["domains"]["tool_call"]["acceptance_length"]["pooled"]
    assert card["acceptance_per_position"][0] == full_report["positions"]["unconditional"][0]["rate"]
    assert (card["speedup"], card["speedup_draft_length"]) == (full_report["speedup"]["pooled"], 4)
    assert card["ece_after"] < card["ece_before"]
    assert card["ece_held_out"] == full_report["confidence"]["ece"]
    assert card["auc_held_out_per_position"] == [p["auc"] for p in full_report["confidence"]["positions"]]
    json.dumps(card)


@pytest.mark.parametrize(("gain", "phrase"), [(1.5, "1.50 times as fast as"), (0.5, "0.50 times as fast, that is slower, as"), (1.0, "about as fast")])
def test_headline_says_faster_slower_or_equal(gain: float, phrase: str) -> None:
    requests = make_requests(8, prompts=1, drafters={"dspark": (0.0, 4)}, temperatures=[0.0])
    speeds = [
        r for i in range(4) for r in (SpeedRecord(str(i), "qa", "plain", 0, 0, 11, 0.1, 1.0), SpeedRecord(str(i), "qa", "dspark", 0, 4, 11, 0.1, 1 / gain))
    ]
    assert phrase in headline(small(requests, speeds, {"dspark": 4}))


def test_requests_without_rounds_are_not_a_zero() -> None:
    report = small([RequestRecord("qa", "p", "dspark", 0.0, 1, "stop", [])], [], {})
    assert report["acceptance_length"] is None
    assert report["domains"]["qa"]["acceptance_length"] is None
    assert report["domains"]["qa"]["requests"] == 1
    assert headline(report) == "No answer was long enough to measure acceptance."


def test_a_report_without_its_headline_is_refused() -> None:
    requests = make_requests(8, prompts=1, drafters={"dflash": (0.0, 4)}, temperatures=[0.0])
    with pytest.raises(DataError, match="no answers by drafter 'dspark'"):
        small(requests, [], {})
    both = make_requests(8, prompts=1, drafters={"dspark": (0.0, 4)}, temperatures=[0.0])
    with pytest.raises(DataError, match="draft length"):
        small(both, make_speeds(0, lengths={"dspark": [4]}), {})


def test_files(full_report: dict[str, Any], tmp_path: Path) -> None:
    write_report_json(full_report, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == full_report
    with pytest.raises(ArtifactError, match=r"none\.json"):
        read_report(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ArtifactError, match="not JSON"):
        read_report(tmp_path / "broken.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema version 99"),
        ({"surprise": 1}, "surprise"),
        ({"notes": None}, "notes"),
        ({"seconds_total": float("inf")}, "seconds_total"),
    ],
)
def test_reports_of_another_schema_are_refused(full_report: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse_report({**full_report, **change})
    with pytest.raises(ArtifactError, match="training"):
        parse_report({k: v for k, v in full_report.items() if k != "training"})


def test_machine_facts() -> None:
    found = machine_facts(accelerator=None)
    assert found.cpu.strip() == found.cpu != ""
    assert found.cores >= 1
    assert machine_facts(accelerator="GPU").accelerator == "GPU"
