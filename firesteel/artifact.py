"""Artifacts: what a stage leaves behind. A folder with a manifest, whole or not there.

A stage works in `NAME.partial/` and commits by rename. The manifest states the kind, a key (what the artifact
was made from: settings and the inputs' content hashes) and the checksum of every file. A stage whose artifact
already has the wanted key is skipped; work found in `NAME.partial/` under the same key is resumed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import firesteel
from firesteel.errors import ArtifactError, FiresteelError, ResourceError

MANIFEST = "manifest.json"
WORK = "work.json"
FORMAT_VERSION = 1
_FULL, _FORBIDDEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS), (errno.EACCES, errno.EPERM)
_PACKAGES = ("torch", "transformers", "safetensors", "datasets")


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    Attributes:
        kind: the stage's artifact kind, e.g. `responses`.
        key: hash of settings and inputs: equal keys mean the artifact need not be made again.
        content: hash over all files; what later stages name as their input.
        inputs: content hash of each input artifact by name.
        settings: the part of the recipe that the artifact depends on.
        files: relative path -> sha256.
        about: what the stage wants to say (target identity, layer ids, counts, seconds ...).
    """

    kind: str
    key: str
    content: str
    inputs: dict[str, str]
    settings: dict[str, Any]
    files: dict[str, str]
    about: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    created: str = ""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Artifact:
    """A committed artifact."""

    path: Path
    manifest: Manifest

    def __truediv__(self, name: str) -> Path:
        return self.path / name


def hash_json(value: Any) -> str:
    """Hash of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def make_key(kind: str, settings: dict[str, Any], inputs: dict[str, str]) -> str:
    """What an artifact is made from, as one hash."""
    return hash_json([kind, FORMAT_VERSION, settings, inputs])


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader sees the old or the new bytes, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise disk_error(e, path) from e


def disk_error(error: OSError, path: Path) -> ResourceError:
    """An OSError of writing, as an error that says what to do."""
    free = shutil.disk_usage(next(p for p in [path, *path.parents] if p.exists())).free
    return ResourceError(
        f"cannot write {path}: {error.strerror or error} ({free / 1e9:.2f} GB free there)",
        mend="free some space or set runs_dir=ANOTHER_DISK; finished work is kept, the same command resumes",
    )


@contextmanager
def disk_errors(folder: Path | None = None) -> Iterator[None]:
    """Around work that writes with other people's code: a full or read-only disk, or a file that may not be used, is one clear error.

    Args:
        folder: where what is written lies, if known; named where the system names no file.

    Raises:
        ResourceError: in place of such an OSError; any other goes on as it is.
    """
    try:
        yield
    except FiresteelError:
        raise
    except Exception as e:
        # Safetensors writes with Rust, whose errors have the system's number in their text alone.
        told = re.search(r"\(os error (\d+)\)", str(e))
        error = e if isinstance(e, OSError) else OSError(int(told[1]), os.strerror(int(told[1]))) if told else None
        if error is None or error.errno not in (*_FULL, *_FORBIDDEN):
            raise
        named = error.filename2 or error.filename  # of a copy the second is written
        path = folder if named is None else Path(os.fsdecode(named))
        if error.errno in _FORBIDDEN:
            mend = "give this user the right to read and write it, or name another place"
            raise ResourceError(f"cannot use {path or 'a file'}: {error.strerror}", mend=mend) from e
        if path is None:
            raise ResourceError(f"a file cannot be written: {error.strerror}", mend="free some space: of this folder, of the run's or of TMPDIR") from e
        raise disk_error(error, path.absolute()) from e


def open_artifact(path: Path, kind: str, *, verify: bool = True) -> Artifact:
    """Open a committed artifact.

    Raises:
        ArtifactError: missing, of another kind or format, or (with `verify`) a file whose checksum differs.
    """
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        raise ArtifactError(f"there is no {kind} in {path}", mend="run the stage before this one: `firesteel run RECIPE` walks all")
    try:
        manifest = Manifest(**json.loads(manifest_path.read_text()))
    except (ValueError, TypeError) as e:
        raise ArtifactError(f"{manifest_path} is corrupt: {e}", mend=f"delete {path} and run the stage again") from None
    if manifest.format_version != FORMAT_VERSION:
        raise ArtifactError(
            f"{manifest_path} has format version {manifest.format_version}, this Firesteel reads {FORMAT_VERSION}",
            mend=f"delete {path} and run the stage again",
        )
    if manifest.kind != kind:
        raise ArtifactError(f"{path} holds {manifest.kind!r}, not {kind!r}", mend="give the folder of the right stage")
    if verify:
        for name, wanted in manifest.files.items():
            file = path / name
            if not file.is_file():
                raise ArtifactError(f"{file} is missing", mend=f"delete {path} and run the stage again")
            found = hash_file(file)
            if found != wanted:
                raise ArtifactError(
                    f"{file} is corrupt: its sha256 is {found[:12]}, the manifest says {wanted[:12]}",
                    mend=f"delete {path} and run the stage again",
                )
    return Artifact(path, manifest)


def is_current(path: Path, kind: str, key: str) -> bool:
    """True if a committed artifact with this key lies at `path`."""
    try:
        current = open_artifact(path, kind, verify=False).manifest.key == key
    except ArtifactError:
        return False
    if current:
        _clear(path)  # of a commit that was killed at its very end
    return current


class ArtifactWriter:
    """The working folder of a stage, resumable until `commit`.

    `resumed` is True if work under the same key was found. `shared` is for the other processes of a stage: the folder is taken as their
    first one has made it.
    """

    def __init__(self, path: Path, kind: str, settings: dict[str, Any], inputs: dict[str, str], *, shared: bool = False) -> None:
        self.final, self.kind, self.settings, self.inputs = path, kind, settings, inputs
        self.key = make_key(kind, settings, inputs)
        self.path = path.with_name(path.name + ".partial")
        self.started = time.time()
        work = self.path / WORK
        self.resumed = work.is_file() and _read_key(work) == self.key
        if not self.resumed and not shared:
            shutil.rmtree(self.path, ignore_errors=True)
            try:
                self.path.mkdir(parents=True)
            except OSError as e:
                raise disk_error(e, path) from e
            write_atomic(work, json.dumps({"kind": kind, "key": self.key}))

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def commit(self, about: dict[str, Any] | None = None, *, drop: Iterable[str] = (), loose: Iterable[str] = ()) -> Artifact:
        """Write the manifest and move the folder to its final name.

        Args:
            about: what to say in the manifest; `seconds` is added.
            drop: names inside the folder that were only needed to resume.
            loose: files that may change later (prose about the artifact): neither checked nor part of its content hash.
        """
        skip, dropped = {MANIFEST, WORK, *loose}, tuple(drop)
        inside = ((p, p.relative_to(self.path)) for p in sorted(self.path.rglob("*")) if p.is_file() and p.name not in skip)
        files = {str(name): hash_file(p) for p, name in inside if name.parts[0] not in dropped}
        manifest = Manifest(
            kind=self.kind,
            key=self.key,
            content=hash_json([self.kind, files]),
            inputs=self.inputs,
            settings=self.settings,
            files=files,
            about={"seconds": round(time.time() - self.started, 3), **(about or {})},
            versions=package_versions(),
            command=sys.argv,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        write_atomic(self.path / MANIFEST, json.dumps(asdict(manifest), indent=1, default=str))
        # Killed before the folder has its name, the stage resumes; so what it resumes from goes last.
        write_atomic(self.path / WORK, json.dumps({"kind": self.kind, "key": self.key, "drop": dropped}))
        old = self.final.with_name(f"{self.final.name}.old-{os.getpid()}")
        if self.final.exists():
            self.final.rename(old)
        self.path.rename(self.final)
        _clear(self.final)
        shutil.rmtree(old, ignore_errors=True)
        return Artifact(self.final, manifest)


def package_versions() -> dict[str, str]:
    """Versions that an artifact's numbers may depend on."""
    found = {"firesteel": firesteel.__version__, "python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _clear(path: Path) -> None:
    """Delete from a committed folder what was only needed to resume."""
    work = path / WORK
    if not work.is_file():
        return
    for name in json.loads(work.read_text()).get("drop", ()):
        victim = path / name
        if victim.is_dir():
            shutil.rmtree(victim, ignore_errors=True)
        else:
            victim.unlink(missing_ok=True)
    work.unlink(missing_ok=True)


def _read_key(work: Path) -> str | None:
    try:
        return json.loads(work.read_text()).get("key")
    except ValueError:
        return None
