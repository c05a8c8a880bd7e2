"""Answers on file: what the target said to a prompt, appended as it comes, looked up by content."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firesteel.artifact import disk_error, hash_json
from firesteel.errors import DataError
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.template import AnsweredTurn

DATA_FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Answered:
    """All turns of one prompt, answered.

    Attributes:
        key: what the answer depends on: prompt, target, sampling, sample number.
        prompt_key: key of the prompt.
        sample: number of this answer among several to the same prompt.
        turns: one per answer due.
        half: the target's products were rounded to bfloat16 while it answered.
    """

    key: str
    prompt_key: str
    sample: int
    turns: list[AnsweredTurn]
    half: bool = False

    def to_row(self) -> dict[str, Any]:
        row = {"key": self.key, "prompt_key": self.prompt_key, "sample": self.sample, "turns": [_turn_row(t) for t in self.turns]}
        return row | ({"half": True} if self.half else {})


def _turn_row(turn: AnsweredTurn) -> dict[str, Any]:
    """Parts that an answer does not have are not written: most targets' have neither."""
    row: dict[str, Any] = {"token_ids": turn.token_ids, "text": turn.text, "finish_reason": turn.finish_reason}
    parts = {"reasoning_content": turn.reasoning_content, "tool_calls": turn.tool_calls}
    return row | {name: part for name, part in parts.items() if part is not None}


def answer_key(prompt: Prompt, sample: int, sampling: dict[str, Any], target: str) -> str:
    """Name of an answer by what it depends on; `target` is the target's fingerprint."""
    return hash_json([prompt.key, sample, sampling, target])


def read_answers(path: Path) -> dict[str, Answered]:
    """Answers of a JSONL file (`.gz` too) by key. A torn last line (killed while writing) is left out.

    Raises:
        DataError: the file is missing, or a line other than the last is broken.
    """
    if not path.is_file():
        raise DataError(f"there is no file of answers {path}", mend="fix responses.answers, or leave it empty to let the target answer")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as e:
        raise DataError(f"{path} cannot be read: {e}", mend="delete the file: the answers are made again") from None
    answers: dict[str, Answered] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            answered = Answered(row["key"], row["prompt_key"], row["sample"], [AnsweredTurn(**t) for t in row["turns"]], bool(row.get("half", False)))
        except (ValueError, TypeError, KeyError) as e:
            if number == len(lines):
                break
            raise DataError(f"{path}:{number} is not an answer: {e}", mend="delete the file: the answers are made again") from None
        answers[answered.key] = answered
    return answers


def append_answers(path: Path, answers: Iterable[Answered]) -> None:
    """Append whole lines to a JSONL file; a torn last line (killed while writing) is cut off first.

    Raises:
        ResourceError: the disk is full.
    """
    text = "".join(json.dumps(a.to_row(), ensure_ascii=False) + "\n" for a in answers)
    try:
        cut_torn_line(path)
        with path.open("ab") as file:
            file.write(text.encode())
    except OSError as e:
        raise disk_error(e, path) from e


def cut_torn_line(path: Path) -> None:
    """Cut off a last line that a kill left without its end, so that the next one does not hang on to it."""
    if path.is_file() and path.stat().st_size > 0:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)


def find_answers_file(setting: str) -> Path:
    """The file that `responses.answers` names: `builtin:NAME` ships with the package.

    Raises:
        DataError: there is no such file.
    """
    if not setting.startswith("builtin:"):
        return Path(setting).expanduser()
    path = DATA_FOLDER / f"{setting.removeprefix('builtin:')}.jsonl.gz"
    if not path.is_file():
        names = ", ".join(sorted(p.name.removesuffix(".jsonl.gz") for p in DATA_FOLDER.glob("*.jsonl.gz"))) or "none"
        raise DataError(f"there are no built-in answers {setting!r}", mend=f"built-in answers: {names}")
    return path
