"""Rows from columnar files: Parquet and Hugging Face datasets. Their libraries are imported only when one is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firesteel.errors import DataError, ResourceError


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file, nulls inside them left out.

    Raises:
        DataError: the file is not Parquet.
        ResourceError: pyarrow is missing.
    """
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise ResourceError(f"reading {path} needs pyarrow", mend="pip install pyarrow, or give a JSONL file") from None
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield prune_nulls(row)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as e:
        raise DataError(f"{path} cannot be read as Parquet: {e}", mend="check the file, or give a JSONL file") from None


def dataset_rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Rows of a Hugging Face dataset, nulls inside them left out.

    Args:
        name: a hub name, or a folder (written by `save_to_disk`, or of data files).
        split: which split of it; a folder that holds one bare split has no other.

    Raises:
        DataError: no such dataset or split.
        ResourceError: the package `datasets` is missing.
    """
    try:
        import datasets
    except ImportError:
        raise ResourceError(f"reading the dataset {name} needs the package datasets", mend="pip install datasets, or give a JSONL file with path=") from None
    folder = Path(name).expanduser()
    saved = any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            found = datasets.load_from_disk(str(folder))
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise DataError(
                        f"dataset {name} has no split {split!r}; it has {', '.join(found)}",
                        mend=f"prompts.sources: dataset_split: {next(iter(found), 'train')}",
                    )
                found = found[split]
        else:
            found = datasets.load_dataset(str(folder) if folder.is_dir() else name, split=split)
    except DataError:
        raise
    except Exception as e:  # the library raises many kinds, those of its file systems and HTTP client among them
        raise DataError(
            f"dataset {name} (split {split}) cannot be loaded: {type(e).__name__}: {e}",
            mend="check prompts.sources: dataset and dataset_split; without network give a folder written by save_to_disk",
        ) from None
    for row in found:
        yield prune_nulls(row)


def prune_nulls(value: Any) -> Any:
    """The value without null entries of its objects, at any depth.

    Columnar files give every object of a column the same fields: a tool schema gets those of all other tools, as nulls.
    """
    if isinstance(value, dict):
        return {k: prune_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [prune_nulls(v) for v in value]
    return value
