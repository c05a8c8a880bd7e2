"""`firesteel bench`: several servers under the same load in alternation, and the chart of what came out."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firesteel import recipe as recipes
from firesteel.artifact import ArtifactWriter, hash_json, open_artifact, package_versions, write_atomic
from firesteel.errors import ArtifactError, DataError, RecipeError, TargetError
from firesteel.evaluation.bench import bench_headline, build, write_bench
from firesteel.evaluation.bench_merge import merge
from firesteel.evaluation.bench_page import write_bench_html, write_charts
from firesteel.evaluation.bench_schema import MIXED, BenchRun, Load, Measurement, ServerFacts
from firesteel.evaluation.machine import machine_facts
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.sources import load_source, load_sources
from firesteel.serving.load import Generator, LoadPlan, drive, find_generator
from firesteel.serving.reach import Reached, authorization, reach, warm_up
from firesteel.serving.scrape import between, scrape
from firesteel.stages.line import Line
from firesteel.stages.prompts import read_prompts, spread
from firesteel.target.server import local_url

NAME = "bench"
_UNNAMED = "server"
Drive = Callable[[Generator, LoadPlan], Load]


@dataclass(frozen=True)
class Round:
    """One measurement that is to be made."""

    repeat: int
    domain: str
    concurrency: int
    server: str

    @property
    def file(self) -> str:
        return f"{hash_json([self.repeat, self.domain, self.concurrency, self.server])[:16]}.json"


def named_servers(texts: Sequence[str]) -> dict[str, str]:
    """Servers as the command line gives them: `NAME=URL`, or one bare URL.

    Raises:
        RecipeError: a text is neither, or two have one name.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, eq, url = text.partition("=")
        if not eq or "://" in name:
            name, url = _UNNAMED, text
        if "://" not in url or not name:
            raise RecipeError(f"--server {text} is not NAME=URL", mend="for example --server drafter=http://127.0.0.1:8000")
        if name in found:
            raise RecipeError(f"two servers are named {name!r}", mend="give each --server a name of its own: --server drafter=URL --server plain=URL")
        found[name] = url
    return found


def run(line: Line, servers: Mapping[str, str], *, drive: Drive = drive) -> Path:
    """Measure servers and write `bench.json`, `bench.html` and the charts into the run's folder; its path.

    What an interrupted run had measured is kept, where servers and settings are the same.

    Args:
        servers: address by name; empty takes `bench.servers`, and without those the one that `firesteel serve` starts.
        drive: what sends the load.

    Raises:
        ResourceError: guidellm is not there.
        RecipeError: a setting contradicts the servers.
        DataError: there are no prompts.
        TargetError: a server cannot be reached, or answers no request at all.
    """
    settings = line.recipe.bench
    generator = find_generator(settings)
    urls = dict(servers) or dict(settings.servers) or {"drafter": local_url(line.recipe.serve.host, line.recipe.serve.port)}
    baseline = _baseline(settings, list(urls))
    key = _api_key(settings)
    reached = {name: reach(name, url, settings.model, key) for name, url in urls.items()}
    groups = _groups(line)
    writer = ArtifactWriter(line.folder / NAME, NAME, {"bench": settings.model_dump(), "servers": urls, "seed": line.recipe.seed}, {})
    salt = _salt(writer, settings)
    rounds = list(_rounds(settings, list(groups), list(urls)))
    (writer / "measurements").mkdir(exist_ok=True)
    kept = sum((writer / "measurements" / r.file).is_file() for r in rounds)
    line.screen.say(f"bench: {', '.join(f'{n} ({r.model} at {r.url})' for n, r in reached.items())}; {len(rounds)} measurements, guidellm {generator.version}")
    with line.screen.bar("load test", len(rounds)) as bar:
        for todo in rounds:
            place = writer / "measurements" / todo.file
            if not place.is_file():
                found = _measure(line, generator, reached[todo.server], todo, groups[todo.domain], salt, key, drive)
                write_atomic(place, found.model_dump_json())
            bar.advance(1, f"{todo.server} at {todo.concurrency}")
    measurements = [Measurement.model_validate_json((writer / "measurements" / r.file).read_text()) for r in rounds]
    _refuse_nothing(measurements)
    facts = {
        name: ServerFacts(url=r.url, model=r.model, software=r.software, counters=any(m.served.drafting is not None for m in measurements if m.server == name))
        for name, r in reached.items()
    }
    notes = [f"{kept} of {len(rounds)} measurements are of an earlier sitting, which was interrupted."] if kept else []
    bench = build(_about(line, generator, groups, baseline, salt), facts, measurements, notes)
    write_bench(bench, writer / "bench.json")
    write_bench_html(bench, writer / "bench.html")
    write_charts(bench, writer.path)
    done = writer.commit({"measurements": len(rounds)}, drop=("measurements", "salt.json"))
    for text in [*bench_headline(bench), *bench.notes]:
        line.screen.say(f"bench: {text}")
    line.screen.say(f"bench: {done.path / 'bench.html'}")
    return done.path


def _measure(
    line: Line, generator: Generator, server: Reached, todo: Round, prompts: Sequence[Prompt], salt: str | None, key: str | None, drive: Drive
) -> Measurement:
    """Warm the server up, then measure between two looks at its counters."""
    settings, headers = line.recipe.bench, authorization(key)

    def plan(part: str, count: int) -> LoadPlan:
        # Not the server's name: all of them get the same texts at the same level and repeat.
        marks = [hash_json([salt, part, todo.repeat, todo.domain, todo.concurrency, i])[:8] if salt is not None else None for i in range(count)]
        chosen = spread(prompts, count)
        requests = [_request(chosen[i % len(chosen)], settings.api, mark) for i, mark in enumerate(marks)]
        body = {"temperature": settings.temperature, **settings.body}
        if settings.temperature > 0:
            body.setdefault("seed", line.recipe.seed)
        return LoadPlan(
            server.url, server.model, settings.api, requests, todo.concurrency, settings.max_new_tokens, body, api_key=key, timeout=settings.request_timeout
        )

    if settings.warmup:
        warm_up(plan("warm-up", settings.warmup * todo.concurrency))
    before = scrape(server.url, headers, settings.request_timeout)
    load = drive(generator, plan("measured", max(settings.min_requests, settings.requests * todo.concurrency)))
    served = between(before, scrape(server.url, headers, settings.request_timeout), todo.server)
    return merge(todo.server, todo.domain, todo.concurrency, todo.repeat, load, served)


def _rounds(settings: recipes.Bench, domains: Sequence[str], servers: Sequence[str]) -> Iterator[Round]:
    """Level by level, at each all servers; every other repeat in the opposite order, so that drift does not favour the first."""
    for repeat in range(settings.repeats):
        for domain in domains:
            for concurrency in settings.concurrency:
                for server in servers if repeat % 2 == 0 else reversed(servers):
                    yield Round(repeat, domain, concurrency, server)


def _request(prompt: Prompt, api: str, mark: str | None) -> list[dict[str, str]] | str:
    """A prompt as it is sent: up to its first answer, with its mark in front of the first turn."""
    messages = [{"role": str(m["role"]), "content": str(m["content"] or "")} for m in prompt.history([])]
    if mark is not None:
        messages[0]["content"] = f"[{mark}] {messages[0]['content']}"
    return messages if api == "chat" else "\n\n".join(m["content"] for m in messages)


def _groups(line: Line) -> dict[str, list[Prompt]]:
    """Prompts to send, by what is measured together: one group of all, or one for each domain; domains take turns in a group."""
    settings = line.recipe.bench
    prompts = _prompts(line)
    domains = list(dict.fromkeys(p.domain for p in prompts))
    unknown = [d for d in settings.domains if d not in domains]
    if unknown:
        raise RecipeError(f"bench.domains has {unknown[0]!r}, of which there is no prompt", mend=f"there are {', '.join(domains)}")
    columns = {d: [p for p in prompts if p.domain == d] for d in settings.domains or domains}
    if settings.by_domain:
        return columns
    longest = max(map(len, columns.values()))
    return {MIXED: [column[i] for i in range(longest) for column in columns.values() if i < len(column)]}


def _prompts(line: Line) -> list[Prompt]:
    settings = line.recipe.bench
    if settings.prompts is not None:
        found = load_source(recipes.Source(path=settings.prompts)).prompts
    else:
        try:
            found = read_prompts(open_artifact(line.folder / "prompts", "prompts"), "eval")
        except ArtifactError:  # the stage has not run; servers of elsewhere need no run
            found = load_sources(line.recipe.prompts, "eval").prompts
    if not found:
        raise DataError("there is no prompt to send", mend="give a file in bench.prompts, or prompts.sources with split: eval")
    return found


def _baseline(settings: recipes.Bench, names: Sequence[str]) -> str:
    if settings.baseline is not None and settings.baseline not in names:
        raise RecipeError(f"bench.baseline={settings.baseline} is none of the servers", mend=f"they are {', '.join(names)}")
    return settings.baseline or ("plain" if "plain" in names else names[-1])


def _api_key(settings: recipes.Bench) -> str | None:
    if settings.api_key_variable is None:
        return None
    found = os.environ.get(settings.api_key_variable)
    if not found:
        raise RecipeError(f"bench.api_key_variable={settings.api_key_variable}, but that variable is not set", mend=f"export {settings.api_key_variable}=KEY")
    return found


def _salt(writer: ArtifactWriter, settings: recipes.Bench) -> str | None:
    """New for each run, so that no prompt was seen by a server before; the same when an interrupted one goes on."""
    if not settings.unique:
        return None
    place = writer / "salt.json"
    if not place.is_file():
        write_atomic(place, json.dumps(secrets.token_hex(8)))
    return str(json.loads(place.read_text()))


def _refuse_nothing(measurements: Sequence[Measurement]) -> None:
    """A chart of no answer at all would be an empty page."""
    if not any(m.completed for m in measurements):
        reasons = "; ".join(dict.fromkeys(what for m in measurements for what in m.failures)) or "no reason was told"
        raise TargetError(f"no request was answered: {reasons}", mend="look at the servers' logs; bench.api and bench.body say how they are asked")


def _about(line: Line, generator: Generator, groups: Mapping[str, Sequence[Prompt]], baseline: str, salt: str | None) -> BenchRun:
    settings = line.recipe.bench
    counts: dict[str, int] = {}
    for group in groups.values():
        for prompt in group:
            counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
    return BenchRun(
        recipe=line.recipe.name,
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        command=shlex.join(["firesteel", *sys.argv[1:]]) if Path(sys.argv[0]).name == "firesteel" else f"firesteel bench {line.recipe.name}",
        seed=line.recipe.seed,
        salt=salt,
        api=settings.api,
        concurrency=settings.concurrency,
        repeats=settings.repeats,
        requests=settings.requests,
        min_requests=settings.min_requests,
        warmup=settings.warmup,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        prompts=counts,
        baseline=baseline,
        machine=machine_facts(accelerator=None),
        versions={**package_versions(), "guidellm": generator.version},
    )
