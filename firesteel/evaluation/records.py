"""Records: what decoding leaves for statistics. Plain dataclasses that go to JSON and back.

How a request is counted. The first token of an answer comes with the prefill and belongs to no round. Every round
then drafts `drafted` tokens, keeps `accepted` of them and adds one token of the target's own. A round that the end
of the answer (end-of-sequence token or token limit) cuts short counts the tokens that were *kept*: drafts behind the
cut are not accepted, whatever the target would have said. The last round may therefore lack the target's own token,
and acceptance lengths err on the low side by at most that one round per request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from firesteel.artifact import write_atomic
from firesteel.errors import ArtifactError, DataError

PLAIN = "plain"
_Record = TypeVar("_Record", "RequestRecord", "SpeedRecord")


@dataclass(frozen=True)
class RoundRecord:
    """One draft-and-verify round.

    Attributes:
        drafted: drafted tokens that were sent to verification.
        accepted: how many of them, from the front, ended up in the answer.
        confidences: for each drafted token the drafter's probability that it survives given that its prefix did
            (in [0, 1], length `drafted`); None where the drafter has no confidence head.
    """

    drafted: int
    accepted: int
    confidences: list[float] | None

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.drafted:
            raise DataError(f"a round accepted {self.accepted} of {self.drafted} drafted tokens")
        if self.confidences is not None:
            if len(self.confidences) != self.drafted:
                raise DataError(f"a round has {len(self.confidences)} confidences for {self.drafted} drafted tokens")
            if not all(0.0 <= c <= 1.0 for c in self.confidences):
                raise DataError(f"a round has confidences outside [0, 1]: {self.confidences}")


@dataclass(frozen=True)
class RequestRecord:
    """One answered prompt.

    Attributes:
        prompt_id: for people; unique only within a source of prompts.
        drafter: `dspark`, `dflash` ...
        temperature: of sampling; 0 is greedy.
        new_tokens: tokens of the answer, the first one included.
        finish_reason: why it ended, e.g. `stop` (end-of-sequence token) or `length` (token limit).
        rounds: in order.
        prompt_key: content hash of the prompt, `/2` ... behind it for later turns; empty where whoever made the record has none.
    """

    domain: str
    prompt_id: str
    drafter: str
    temperature: float
    new_tokens: int
    finish_reason: str
    rounds: list[RoundRecord]
    prompt_key: str = ""

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def prompt(self) -> tuple[str, str]:
        """What records of the same prompt share."""
        return self.domain, self.prompt_key or self.prompt_id


@dataclass(frozen=True)
class SpeedRecord:
    """One timed answer.

    Attributes:
        prompt_id, prompt_key: as of `RequestRecord`.
        arm: `plain` (no drafter) or the drafter's name.
        repeat: number of the repetition, from 0.
        draft_length: tokens drafted per round; 0 in the plain arm.
        new_tokens: tokens of the answer, the first one included.
        seconds_prefill: until the first token was known.
        seconds_decode: from then to the last token; covers `new_tokens - 1` tokens.
    """

    prompt_id: str
    domain: str
    arm: str
    repeat: int
    draft_length: int
    new_tokens: int
    seconds_prefill: float
    seconds_decode: float
    prompt_key: str = ""

    @property
    def prompt(self) -> tuple[str, str]:
        """What records of the same prompt share."""
        return self.domain, self.prompt_key or self.prompt_id

    def __post_init__(self) -> None:
        if self.new_tokens < 0 or self.seconds_prefill < 0 or self.seconds_decode < 0:
            raise DataError(f"prompt {self.prompt_id}: a timed answer has negative tokens or seconds")
        if (self.arm == PLAIN) != (self.draft_length == 0):
            raise DataError(f"prompt {self.prompt_id}: arm {self.arm!r} with draft_length {self.draft_length}; only the plain arm drafts nothing")


def request_from_json(row: Mapping[str, Any]) -> RequestRecord:
    """The inverse of `dataclasses.asdict`.

    Raises:
        DataError: a field is missing, unknown or contradictory.
    """
    try:
        rounds = [RoundRecord(**r) for r in row["rounds"]]
        return RequestRecord(**{**row, "rounds": rounds})
    except (KeyError, TypeError) as e:
        raise DataError(f"not a request record: {e}") from None


def speed_from_json(row: Mapping[str, Any]) -> SpeedRecord:
    """The inverse of `dataclasses.asdict`.

    Raises:
        DataError: a field is missing, unknown or contradictory.
    """
    try:
        return SpeedRecord(**row)
    except TypeError as e:
        raise DataError(f"not a speed record: {e}") from None


def write_records(path: Path, records: Iterable[RequestRecord | SpeedRecord]) -> None:
    """Write one record per line, atomically."""
    write_atomic(path, "".join(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in records))


def read_requests(path: Path) -> list[RequestRecord]:
    """Read what `write_records` wrote.

    Raises:
        ArtifactError: the file is missing or a line is not a request record.
    """
    return [_parse(path, number, line, request_from_json) for number, line in _lines(path)]


def read_speeds(path: Path) -> list[SpeedRecord]:
    """Read what `write_records` wrote.

    Raises:
        ArtifactError: the file is missing or a line is not a speed record.
    """
    return [_parse(path, number, line, speed_from_json) for number, line in _lines(path)]


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ArtifactError(f"cannot read {path}: {e.strerror}", mend="run `firesteel evaluate RECIPE` again") from None
    # Not splitlines(): JSON strings may hold line separators such as U+2028 unescaped.
    return [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _parse(path: Path, number: int, line: str, build: Callable[[Mapping[str, Any]], _Record]) -> _Record:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise DataError(f"a record is a JSON object, this is a {type(row).__name__}")
        return build(row)
    except (ValueError, DataError) as e:
        raise ArtifactError(f"{path}, line {number}: {e}", mend=f"delete {path} and run `firesteel evaluate RECIPE` again") from None
