"""Load on an OpenAI-compatible server, sent by guidellm: the one file that knows guidellm.

guidellm runs as a program of its own, told by a file and heard by a file: its command line is what its project documents, and its
dependencies may then live in another environment (`bench.python`). Only the times and token counts of single requests are taken
from it; every figure is made from those by `evaluation/bench_merge.py`, so that a definition means the same for every server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firesteel import recipe as recipes
from firesteel.errors import ResourceError
from firesteel.evaluation.bench_schema import Answer, Load
from firesteel.target.server import find_python

TESTED = ("0.8", "0.9")  # from the first, and below the second: the range in pyproject.toml
_REPORT_VERSION = 2
_ASK_VERSION = "from importlib.metadata import version\nprint(version('guidellm'))\n"
_SHORT = 160


@dataclass(frozen=True)
class Generator:
    """A guidellm that was found: the interpreter that has it, and its version."""

    python: str
    version: str


@dataclass(frozen=True)
class LoadPlan:
    """One measurement: `len(requests)` requests, `concurrency` of them under way at a time.

    Attributes:
        requests: of each its messages (api `chat`: role and content) or its text (api `completions`).
        body: further fields of every request.
        api_key: sent as a bearer token.
        timeout: seconds until the next byte of an answer must come.
    """

    url: str
    model: str
    api: str
    requests: Sequence[list[dict[str, str]] | str]
    concurrency: int
    max_new_tokens: int
    body: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout: float = 600.0


def find_generator(bench: recipes.Bench) -> Generator:
    """The guidellm that the recipe names.

    Raises:
        RecipeError: there is no such interpreter.
        ResourceError: it has no guidellm, or one of another series.
    """
    python = find_python(bench.python, "bench.python", mend="give the Python of the environment that has guidellm")
    done = subprocess.run([python, "-c", _ASK_VERSION], capture_output=True, text=True, check=False)
    version = done.stdout.strip()
    if not version:
        raise ResourceError(
            f"guidellm, which sends the load, is not installed in the environment of {python}",
            mend='`pip install "firesteel[bench]"`, or bench.python=PYTHON of an environment that has it',
        )
    low, high = (_series(v) for v in TESTED)
    if not low <= _series(version) < high:
        raise ResourceError(
            f"guidellm {version} in the environment of {python} is not of the series that Firesteel reads",
            mend=f'`pip install "firesteel[bench]"` there (guidellm>={TESTED[0]},<{TESTED[1]})',
        )
    return Generator(python, version)


def drive(generator: Generator, plan: LoadPlan) -> Load:
    """Send the load of one measurement and wait for all answers; requests that fail are counted, not raised.

    Raises:
        ResourceError: guidellm itself ended with an error, or wrote what cannot be read.
    """
    # A folder of its own: guidellm reads `.env` where it runs, and its data set library keeps copies of what it reads.
    with tempfile.TemporaryDirectory(prefix="firesteel-bench-") as name:
        folder = Path(name)
        _write_plan(folder, plan)
        own = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [generator.python, "-m", "guidellm", "run", "--config", str(folder / "plan.json"), "--disable-console"]
        log = folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=folder, env={**os.environ, **own}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # its workers, too
                process.wait()
                raise
        report = folder / "report.json"
        if not report.is_file():
            lines = [text.strip() for text in log.read_text(errors="replace").splitlines() if text.strip()]
            raise ResourceError(f"guidellm ended with code {code} and without a report: {(lines or ['it said nothing'])[-1][-400:]}")
        return parse_report(json.loads(report.read_text()))


def parse_report(report: dict[str, Any]) -> Load:
    """The requests of guidellm's report of one benchmark.

    An answer for which the server told no number of tokens counts as failed: chunks of a stream are no tokens where drafts are accepted.

    Raises:
        ResourceError: the report is of another version than this reads.
    """
    version = report.get("metadata", {}).get("version")
    if version != _REPORT_VERSION or len(report.get("benchmarks", [])) != 1:
        raise ResourceError(f"guidellm wrote a report of version {version}, Firesteel reads {_REPORT_VERSION}", mend='`pip install "firesteel[bench]"`')
    requests = report["benchmarks"][0]["requests"]
    answers: list[Answer] = []
    failures: dict[str, int] = {}
    for row in requests["successful"] or []:
        answer = _answer(row)
        if isinstance(answer, str):
            failures[answer] = failures.get(answer, 0) + 1
        else:
            answers.append(answer)
    for kind, unsaid in (("errored", "failed without a reason"), ("incomplete", "was not answered to the end")):
        for row in requests[kind] or []:
            what = _shorten(row["info"].get("error") or unsaid)
            failures[what] = failures.get(what, 0) + 1
    return Load(answers=answers, failures=failures)


def _answer(row: dict[str, Any]) -> Answer | str:
    """One answered request, or why it cannot be counted."""
    times, tokens = row["info"]["timings"], row["output_metrics"]["text_tokens"]
    if not tokens:
        return "the server told no number of output tokens (stream_options.include_usage)"
    start, end = times["request_start"], times["request_end"]
    first, last = times["first_token_iteration"], times["last_token_iteration"]
    if start is None or end is None or first is None or last is None:
        return "the answer had no text"
    prompt = row["input_metrics"]["text_tokens"] or 0
    return Answer(start=start, first=first, last=last, end=end, prompt_tokens=prompt, tokens=tokens, chunks=max(1, times["token_iterations"]))


def _write_plan(folder: Path, plan: LoadPlan) -> None:
    column = {"raw_messages_column": "messages"} if plan.api == "chat" else {"text_column": "prompt"}
    rows = [{next(iter(column.values())): request} for request in plan.requests]
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    backend = {
        "kind": "openai_http",
        "target": plan.url,
        "model": plan.model,
        "request_format": "/v1/chat/completions" if plan.api == "chat" else "/v1/completions",
        "validate_backend": False,  # /health is not part of the API
        "timeout": plan.timeout,
        "max_tokens": plan.max_new_tokens,
        "extras": {"body": plan.body},
        **({} if plan.api_key is None else {"api_key": plan.api_key}),
    }
    spec = {
        "backend": backend,
        "profile": {"kind": "concurrent", "streams": [plan.concurrency]},
        "constraints": [{"kind": "max_requests", "count": len(plan.requests)}],
        "data": [{"kind": "json_file", "path": str(folder / "requests.jsonl")}],
        "data_column_mapper": {"kind": "generative_column_mapper", "column_mappings": column},
        "outputs": [{"kind": "json", "path": str(folder / "report.json")}],
    }
    (folder / "plan.json").write_text(json.dumps({"spec": spec}), encoding="utf-8")


def _shorten(error: str) -> str:
    """The first line of an error, so that the same cause counts together."""
    line = next((text.strip() for text in error.splitlines() if text.strip()), "failed without a reason")
    return line if len(line) <= _SHORT else line[: _SHORT - 3] + "..."


def _series(version: str) -> tuple[int, int]:
    parts = version.split(".")
    return int(parts[0]), int("".join(c for c in parts[1] if c.isdigit()) or 0)
