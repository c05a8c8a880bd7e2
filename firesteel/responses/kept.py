"""Answers of a stage's work file: single ones, appended as they come, so that a kill loses none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from firesteel.artifact import disk_error, hash_json
from firesteel.responses.answers import cut_torn_line
from firesteel.responses.generate import Answer, Ask, Sampling
from firesteel.responses.generator import Generator


class KeptAnswers:
    """
    Args:
        path: a JSONL file; read where it is there (a torn last line is cut off), appended to.
        target: fingerprint of who answers: what another one said is not taken.

    Raises:
        ResourceError: (also later) the disk is full.
    """

    def __init__(self, path: Path, target: str) -> None:
        self.path, self.target = path, target
        cut_torn_line(path)
        rows = [json.loads(text) for text in path.read_text(encoding="utf-8").split("\n") if text] if path.is_file() else []
        self._known = {row["key"]: Answer(row["token_ids"], row["finish_reason"]) for row in rows}

    def answers(self, generator: Generator, asks: Sequence[Ask], sampling: Sampling, eos_ids: Sequence[int]) -> list[Answer]:
        """The answers in the order of their prompts; the generator gives those that are not on file."""
        keys = [hash_json([ask.name, ask.token_ids, asdict(sampling), self.target]) for ask in asks]
        missing = [i for i, key in enumerate(keys) if key not in self._known]

        def done(index: int, answer: Answer) -> None:
            key = keys[missing[index]]
            self._known[key] = answer
            self._append(key, answer)

        generator.run([asks[i] for i in missing], sampling, eos_ids, done)
        return [self._known[key] for key in keys]

    def _append(self, key: str, answer: Answer) -> None:
        row = {"key": key, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
        try:
            with self.path.open("ab") as file:
                file.write((json.dumps(row) + "\n").encode())
        except OSError as e:
            raise disk_error(e, self.path) from e
