"""Records survive JSON, and refuse what cannot have happened."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from firesteel.errors import ArtifactError, DataError
from firesteel.evaluation.records import (
    PLAIN,
    RequestRecord,
    RoundRecord,
    SpeedRecord,
    read_requests,
    read_speeds,
    request_from_json,
    speed_from_json,
    write_records,
)

# U+2028 separates lines for str.splitlines, not for JSON.
REQUEST = RequestRecord("qa", "prompt \u2028 ü", "dspark", 0.7, 6, "stop", [RoundRecord(3, 2, [0.9, 0.5, 0.1]), RoundRecord(2, 0, None)])
SPEED = SpeedRecord("p", "qa", PLAIN, 1, 0, 10, 0.1, 0.9)


def test_requests_and_speeds_survive_json() -> None:
    assert request_from_json(json.loads(json.dumps(asdict(REQUEST)))) == REQUEST
    assert speed_from_json(json.loads(json.dumps(asdict(SPEED)))) == SPEED


def test_a_prompt_is_known_by_its_content_and_without_it_by_its_id() -> None:
    old = asdict(REQUEST)
    del old["prompt_key"]  # as records were written before they had one
    assert request_from_json(old) == REQUEST
    assert REQUEST.prompt == ("qa", REQUEST.prompt_id)
    assert replace(REQUEST, prompt_key="a1").prompt == ("qa", "a1")
    assert replace(SPEED, prompt_key="a1").prompt == ("qa", "a1") != SPEED.prompt


def test_files_hold_one_record_per_line(tmp_path: Path) -> None:
    write_records(tmp_path / "requests.jsonl", [REQUEST, REQUEST])
    write_records(tmp_path / "speeds.jsonl", [SPEED])
    assert read_requests(tmp_path / "requests.jsonl") == [REQUEST, REQUEST]
    assert read_speeds(tmp_path / "speeds.jsonl") == [SPEED]


@pytest.mark.parametrize("line", ["{", "[1]", '{"domain": "qa"}', json.dumps({**asdict(REQUEST), "extra": 1})])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(asdict(REQUEST)) + "\n" + line + "\n")
    with pytest.raises(ArtifactError, match=r"requests\.jsonl, line 2"):
        read_requests(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"none\.jsonl"):
        read_speeds(tmp_path / "none.jsonl")


@pytest.mark.parametrize(("drafted", "accepted", "confidences"), [(2, 3, None), (2, -1, None), (2, 1, [0.5]), (1, 1, [1.5]), (1, 1, [float("nan")])])
def test_impossible_rounds_are_refused(drafted: int, accepted: int, confidences: list[float] | None) -> None:
    with pytest.raises(DataError):
        RoundRecord(drafted, accepted, confidences)


@pytest.mark.parametrize(("arm", "length", "seconds"), [(PLAIN, 4, 1.0), ("dspark", 0, 1.0), (PLAIN, 0, -1.0)])
def test_impossible_timings_are_refused(arm: str, length: int, seconds: float) -> None:
    with pytest.raises(DataError):
        SpeedRecord("p", "qa", arm, 0, length, 10, 0.1, seconds)
