"""Where prompts come from: built-in files, JSONL, Parquet and Hugging Face datasets, as the recipe lists them."""

from __future__ import annotations

import difflib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from firesteel import recipe as recipes
from firesteel.errors import DataError, RecipeError
from firesteel.prompts.columns import dataset_rows, parquet_rows
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.dropped import Dropped
from firesteel.prompts.shapes import Skipped, parse_row

BUILTIN_FOLDER = Path(__file__).parent / "data"
BUILTIN_ALL = "nine-domains"
WRITTEN_FOLDER = BUILTIN_FOLDER / "written"  # prompts that a target wrote itself (`synthesize`), kept so that a recipe need not wait for them
Split = Literal["train", "eval"]


@dataclass
class Loaded:
    """Prompts of one or several sources.

    Attributes:
        dropped: rows that could not be used, by reason.
        notes: alterations of rows that were used, e.g. answers left out.
    """

    prompts: list[Prompt] = field(default_factory=list)
    dropped: Dropped = field(default_factory=Dropped)
    notes: Dropped = field(default_factory=Dropped)

    def extend(self, other: Loaded) -> None:
        self.prompts.extend(other.prompts)
        self.dropped.merge(other.dropped)
        self.notes.merge(other.notes)


@dataclass(frozen=True)
class _Row:
    """A row, or the reason why the line holds none."""

    where: str
    name: str
    value: object = None
    broken: str | None = None


def load_sources(settings: recipes.Prompts, split: Split) -> Loaded:
    """All sources of the recipe for one split, in their order; `synthesize` ones are the caller's, who has the target.

    Raises:
        RecipeError: a source names none or several places.
        DataError: a place is missing, empty or without a usable row.
    """
    loaded = Loaded()
    for number, source in enumerate(settings.sources):
        check_source(source, number)
        if source.split == split and source.synthesize is None:
            loaded.extend(load_source(source))
    return loaded


def check_source(source: recipes.Source, number: int) -> None:
    """A source names exactly one place.

    Args:
        number: its index in `prompts.sources`, for the message.

    Raises:
        RecipeError: it names none, or several.
    """
    named = [k for k in ("builtin", "path", "dataset", "synthesize") if getattr(source, k) is not None]
    if len(named) != 1:
        raise RecipeError(
            f"prompts.sources[{number}] names {' and '.join(named) or 'no place'}",
            mend="give each source exactly one of builtin, path, dataset and synthesize",
        )
    if source.like and source.synthesize is None:
        raise RecipeError(f"prompts.sources[{number}].like is set, but this source synthesizes nothing", mend="add synthesize: COUNT, or leave out like")


def load_source(source: recipes.Source) -> Loaded:
    """Rows of one source as prompts; `limit` counts usable rows.

    Raises:
        DataError: the place is missing, empty or without a usable row.
    """
    if source.builtin is not None:
        rows, origin = builtin_rows(source.builtin, source.split), f"built-in {source.builtin}"
    elif source.path is not None:
        rows, origin = file_rows(Path(source.path).expanduser()), source.path
    else:
        assert source.dataset is not None, "check_source lets only sources with a place pass"
        rows, origin = _numbered(dataset_rows(source.dataset, source.dataset_split), source.dataset.rstrip("/")), source.dataset
    return _parse(rows, origin, source)


def load_file(path: Path, *, limit: int | None, domain: str | None) -> Loaded:
    """Prompts of one file, outside any recipe section."""
    return _parse(file_rows(path), str(path), recipes.Source.model_validate({"path": str(path), "limit": limit, "domain": domain}))


def builtin_domains() -> list[str]:
    """Names of the built-in domains."""
    return sorted(p.stem for p in BUILTIN_FOLDER.glob("*.jsonl"))


def builtin_rows(name: str, split: str) -> Iterator[_Row]:
    """Built-in rows of a split: of one domain, or of all in turn, so that a limit takes as many of each; or those that a target wrote.

    Raises:
        DataError: there is no such domain.
    """
    domains, written = builtin_domains(), {p.name.split(".")[0]: p for p in sorted(WRITTEN_FOLDER.glob("*.jsonl*"))}
    if name in written:
        yield from (row for row in file_rows(written[name]) if _split_of(row) == split)
        return
    if name != BUILTIN_ALL and name not in domains:
        known = [BUILTIN_ALL, *domains, *written]
        near = difflib.get_close_matches(name, known, n=1)
        mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise DataError(f"there are no built-in prompts {name!r}", mend=mend)
    chosen = domains if name == BUILTIN_ALL else [name]
    columns = [[r for r in file_rows(BUILTIN_FOLDER / f"{d}.jsonl") if _split_of(r) == split] for d in chosen]
    for rank in itertools.zip_longest(*columns):
        yield from (row for row in rank if row is not None)


def file_rows(path: Path) -> Iterator[_Row]:
    """Rows of a JSONL (also `.jsonl.gz`), JSON or Parquet file, named `FILE:LINE` (Parquet: `FILE:ROW`, from 1).

    Raises:
        DataError: the file is missing or of an unknown kind.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder", mend=f"prompts.sources: dataset: {path} reads a folder of a Hugging Face dataset")
    if not path.is_file():
        raise DataError(f"there is no file {path}", mend="check prompts.sources: path; it is relative to where the command runs")
    kind = Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        return _jsonl_rows(path)
    zipped = path.suffix.lower() == ".gz"
    if kind == ".json" and not zipped:
        return _json_rows(path)
    if kind == ".parquet" and not zipped:
        return _numbered(parquet_rows(path), path.name)
    ending = "".join(path.suffixes[-2:] if zipped else path.suffixes[-1:])
    raise DataError(f"{path} is of an unknown kind {ending!r}", mend="prompts are read from .jsonl, .jsonl.gz, .json and .parquet files")


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    zipped = path.suffix.lower() == ".gz"
    stem = Path(path.stem).stem if zipped else path.stem
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    value, broken = _decode(line)
                    yield _Row(f"{path.name}:{number}", f"{stem}-{number}", value, broken)
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise DataError(f"{path} is damaged: {e}", mend="fetch or pack it again") from None


def _json_rows(path: Path) -> Iterator[_Row]:
    value, broken = _decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    if broken is not None:
        # Many a `.json` holds one object a line.
        return _jsonl_rows(path)
    return _numbered(value if isinstance(value, list) else [value], path.name)


def _decode(line: bytes) -> tuple[Any, str | None]:
    try:
        return json.loads(line.decode()), None
    except UnicodeDecodeError:
        return None, "invalid UTF-8"
    except (ValueError, RecursionError):
        return None, "invalid JSON"


def _numbered(values: Iterable[object], name: str) -> Iterator[_Row]:
    stem = Path(name).stem
    return (_Row(f"{name}:{number}", f"{stem}-{number}", value) for number, value in enumerate(values, 1))


def _split_of(row: _Row) -> object:
    return row.value.get("split") if isinstance(row.value, dict) else None


def _parse(rows: Iterator[_Row], origin: str, source: recipes.Source) -> Loaded:
    loaded, seen = Loaded(), 0
    for row in rows:
        seen += 1
        stem = row.name.rsplit("-", 1)[0]
        parsed = Skipped(row.broken) if row.broken else parse_row(row.value, where=row.where, domain=stem, name=row.name)
        if isinstance(parsed, Skipped):
            loaded.dropped.add(parsed.reason, row.where)
            continue
        for note in parsed.notes:
            loaded.notes.add(note, row.where)
        p = parsed.prompt
        loaded.prompts.append(Prompt(p.id, source.domain or p.domain, p.messages, p.tools, p.source))
        if source.limit is not None and len(loaded.prompts) == source.limit:
            break
    if seen == 0:
        raise DataError(f"{origin} holds no rows", mend='give one JSON object a line, e.g. {"messages": [{"role": "user", "content": "..."}]}')
    if not loaded.prompts:
        reasons = "; ".join(loaded.dropped.lines())
        raise DataError(
            f"{origin} holds no usable row: {reasons}", mend="rows may have messages, conversations (ShareGPT), turns, prompt, question or instruction"
        )
    return loaded
