from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from firesteel.errors import DataError, RecipeError
from firesteel.prompts import sources
from firesteel.prompts.sources import builtin_domains, file_rows, load_file, load_source, load_sources
from firesteel.recipe import Prompts, Source


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def texts(loaded: sources.Loaded) -> list[str]:
    return [p.messages[-1]["content"] for p in loaded.prompts]


def test_jsonl_of_mixed_shapes_counts_what_it_skips(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", {"prompt": "a"}, "", "{broken", {"turns": ["b"]}, {"x": 1}, "{broken too", {"question": "c", "domain": "own"})
    loaded = load_source(Source(path=str(path)))
    assert texts(loaded) == ["a", "b", "c"]
    assert [(p.id, p.domain, p.source) for p in loaded.prompts] == [
        ("chats-1", "chats", "chats.jsonl:1"),
        ("chats-4", "chats", "chats.jsonl:4"),
        ("chats-7", "own", "chats.jsonl:7"),
    ]
    assert loaded.dropped.to_dict() == {"invalid JSON": {"count": 2, "first": "chats.jsonl:3"}, "unknown shape": {"count": 1, "first": "chats.jsonl:5"}}
    assert {p.domain for p in load_source(Source(path=str(path), domain="mine")).prompts} == {"mine"}


def test_limit_counts_usable_rows_and_notes_are_kept(tmp_path: Path) -> None:
    answered = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = write(tmp_path / "c.jsonl", "{", answered, {"prompt": "b"}, {"prompt": "c"})
    loaded = load_file(path, limit=2, domain=None)
    assert texts(loaded) == ["a", "b"]
    assert loaded.notes.first == {"the answer in the file was left out: the target answers itself": "c.jsonl:2"}


def test_bytes_that_are_not_text_and_marks_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}\r\n{"prompt": "b"}')
    loaded = load_source(Source(path=str(path)))
    assert texts(loaded) == ["a", "b"]
    assert loaded.dropped.counts == {"invalid UTF-8": 1}


def test_json_lists_and_json_lines_in_a_json_file(tmp_path: Path) -> None:
    listed, lines = tmp_path / "a.json", write(tmp_path / "b.json", {"prompt": "a"}, {"prompt": "b"})
    listed.write_text('[{"prompt": "a"},\n {"prompt": "b"}]')
    assert texts(load_file(listed, limit=None, domain=None)) == texts(load_file(lines, limit=None, domain=None)) == ["a", "b"]


def test_packed_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    packed = gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    path.write_bytes(packed)
    loaded = load_file(path, limit=None, domain=None)
    assert [(p.source, texts_of) for p, texts_of in zip(loaded.prompts, texts(loaded), strict=True)] == [("a.jsonl.gz:1", "a"), ("a.jsonl.gz:2", "b")]
    path.write_bytes(packed[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is damaged"):
        load_file(path, limit=None, domain=None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, r"there is no file .*none\.jsonl"),
        ("empty.jsonl", "", r"empty\.jsonl holds no rows"),
        ("blank.jsonl", "\n\n", r"blank\.jsonl holds no rows"),
        ("bad.jsonl", "{\n3\n", r"bad\.jsonl holds no usable row: 1 x a row that is a int, not an object.*1 x invalid JSON \(first: bad\.jsonl:1\)"),
        ("odd.csv", "x", r"odd\.csv is of an unknown kind"),
        ("a.parquet.gz", "x", r"a\.parquet\.gz is of an unknown kind"),
        ("bad.parquet", "x", r"bad\.parquet cannot be read as Parquet"),
    ],
)
def test_files_without_prompts_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_source(Source(path=str(path)))


def test_a_folder_as_path_points_to_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder\n.*dataset: "):
        file_rows(tmp_path)


def test_parquet_rows_lose_the_nulls_that_columns_gave_them(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"y": {"type": "integer"}}}}}
    rows = [{"messages": [{"role": "user", "content": t}], "tools": [one]} for t, one in (("a", tool), ("b", other))]
    path = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    loaded = load_source(Source(path=str(path)))
    assert texts(loaded) == ["a", "b"]
    assert [p.tools for p in loaded.prompts] == [[tool], [other]]
    assert loaded.prompts[1].source == "c.parquet:2"


def test_datasets_from_folders_and_their_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}])
    table.save_to_disk(str(tmp_path / "bare"))
    datasets.DatasetDict({"first": table}).save_to_disk(str(tmp_path / "named"))
    assert texts(load_source(Source(dataset=str(tmp_path / "bare")))) == ["a"]
    loaded = load_source(Source(dataset=str(tmp_path / "named"), dataset_split="first", domain="chat"))
    assert [(p.id, p.domain, p.messages[0]["content"]) for p in loaded.prompts] == [("named-1", "chat", "a")]
    with pytest.raises(DataError, match=r"no split 'train'; it has first\n.*dataset_split: first"):
        load_source(Source(dataset=str(tmp_path / "named")))


def test_hub_names_go_to_load_dataset_and_its_failures_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def fake(name: str, split: str) -> list[dict[str, object]]:
        asked.append((name, split))
        if split == "nope":
            raise ConnectionError("offline")
        return [{"prompt": "a", "system": None}]

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert texts(load_source(Source(dataset="org/name", dataset_split="test"))) == ["a"]
    with pytest.raises(DataError, match=r"dataset org/name \(split nope\) cannot be loaded: ConnectionError: offline"):
        load_source(Source(dataset="org/name", dataset_split="nope"))
    assert asked == [("org/name", "test"), ("org/name", "nope")]


def test_builtin_domains_are_interleaved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for domain in ("aa", "bb"):
        rows = [{"id": f"{domain}{i}", "domain": domain, "split": "eval" if i == 1 else "train", "turns": [f"{domain} {i}"]} for i in range(3)]
        write(tmp_path / f"{domain}.jsonl", *rows)
    monkeypatch.setattr(sources, "BUILTIN_FOLDER", tmp_path)
    assert builtin_domains() == ["aa", "bb"]
    assert [p.id for p in load_source(Source(builtin="nine-domains")).prompts] == ["aa0", "bb0", "aa2", "bb2"]
    assert [p.id for p in load_source(Source(builtin="bb", split="eval")).prompts] == ["bb1"]
    with pytest.raises(DataError, match=r"no built-in prompts 'nine-domain'\n.*nine-domains"):
        load_source(Source(builtin="nine-domain"))


def test_sources_of_a_recipe_by_split(tmp_path: Path) -> None:
    train, held = write(tmp_path / "t.jsonl", {"prompt": "a"}, "{"), write(tmp_path / "h.jsonl", {"prompt": "b"}, "{")
    settings = Prompts(sources=[Source(path=str(train)), Source(path=str(held), split="eval"), Source(synthesize=3)], max_tokens=64, near_duplicate=0.8)
    loaded = load_sources(settings, "train")
    assert texts(loaded) == ["a"]
    assert loaded.dropped.first == {"invalid JSON": "t.jsonl:2"}
    assert texts(load_sources(settings, "eval")) == ["b"]


@pytest.mark.parametrize("source", [Source(), Source(builtin="qa", path="x")])
def test_a_source_names_exactly_one_place(source: Source) -> None:
    with pytest.raises(RecipeError, match=r"prompts\.sources\[1\] names"):
        load_sources(Prompts(sources=[Source(split="eval", synthesize=1), source]), "train")


def test_heavy_libraries_are_not_imported_by_the_room() -> None:
    code = (
        "import sys\n"
        "from firesteel.prompts import columns, conversation, dedupe, dropped, shapes, sources, synthesis, template\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
