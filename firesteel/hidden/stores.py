"""Where captured states are kept: one file per document on disk, or in memory through the same codec."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from firesteel.artifact import disk_error, write_atomic
from firesteel.errors import HiddenStateError
from firesteel.hidden.codec import CodecName, decode_sample, encode_sample, state_bytes, verify
from firesteel.hidden.sample import HiddenSample

SUFFIX = ".safetensors"
HEADER_BYTES = 1024  # safetensors' own table and our header, rounded up; per document
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_MEND = "the stage `extract` makes states anew: firesteel extract RECIPE"


class HiddenStore(Protocol):
    """Samples by key. What `get` returns is what the codec made of what was put, the same in every store."""

    def put(self, sample: HiddenSample) -> None:
        """Keep a sample; one with the same key is replaced."""

    def get(self, key: str) -> HiddenSample:
        """The sample of this key, to be read and not written.

        Raises:
            HiddenStateError: there is none, or it is corrupt.
        """

    def __contains__(self, key: str) -> bool: ...

    def keys(self) -> list[str]:
        """All keys, sorted."""

    def nbytes(self) -> int:
        """Bytes in use."""


class DiskStore:
    """One file `KEY.safetensors` per sample, in a folder that is made at the first `put`.

    A file appears by rename, so it is whole or it is not there; what a killed writer leaves behind has another name and
    is never read. Nothing is read when the store is opened; a sample is mapped, not copied, and its checksum verified.
    """

    def __init__(self, folder: Path, codec: CodecName) -> None:
        self.folder, self.codec = folder, codec

    def put(self, sample: HiddenSample) -> None:
        """Write a sample.

        Raises:
            HiddenStateError: a state is not finite, or the key cannot name a file.
            ResourceError: the disk is full or read-only.
        """
        path = self._path(sample.key)
        tensors, header = encode_sample(sample, self.codec)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise disk_error(e, self.folder) from e
        write_atomic(path, save(tensors, metadata=header))

    def get(self, key: str) -> HiddenSample:
        path = self._path(key)
        if not path.is_file():
            raise HiddenStateError(f"there are no hidden states of document {key} in {self.folder}", mend=_MEND)
        try:
            with safe_open(path, framework="pt") as file:
                header: dict[str, str] = file.metadata() or {}
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError) as e:
            raise HiddenStateError(f"{path} is corrupt: {e}", mend=_MEND) from None
        verify(tensors, header, str(path))
        if header["key"] != key:
            raise HiddenStateError(f"{path} holds the states of document {header['key']}", mend=_MEND)
        return decode_sample(tensors, header)

    def __contains__(self, key: str) -> bool:
        return self._path(key).is_file()

    def keys(self) -> list[str]:
        return sorted(path.name.removesuffix(SUFFIX) for path in self._files())

    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self._files())

    def sweep(self) -> int:
        """Remove what killed writers left behind; returns how many files. Only while nobody else writes here."""
        left = list(self.folder.glob(f".*{SUFFIX}.*.tmp"))
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob(f"*{SUFFIX}") if _KEY.fullmatch(path.name)]

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise HiddenStateError(f"document key {key!r} cannot name a file", mend="keys are letters, digits, '-', '_' and '.'")
        return self.folder / f"{key}{SUFFIX}"


class MemoryStore:
    """Samples in memory, encoded: as large as on disk and with the same numbers."""

    def __init__(self, codec: CodecName) -> None:
        self.codec = codec
        self._samples: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {}

    def put(self, sample: HiddenSample) -> None:
        """Keep a copy of a sample.

        Raises:
            HiddenStateError: a state is not finite.
        """
        tensors, header = encode_sample(sample, self.codec)
        # A clone, because a slice would keep the whole forward pass it was cut from.
        self._samples[sample.key] = {name: tensor.clone() for name, tensor in tensors.items()}, header

    def get(self, key: str) -> HiddenSample:
        if key not in self._samples:
            raise HiddenStateError(f"there are no hidden states of document {key} in memory", mend=_MEND)
        return decode_sample(*self._samples[key])

    def __contains__(self, key: str) -> bool:
        return key in self._samples

    def keys(self) -> list[str]:
        return sorted(self._samples)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors, _ in self._samples.values() for tensor in tensors.values())


def predict_bytes(tokens: int, supervised: int, m: int, d: int, codec: CodecName, documents: int = 1) -> int:
    """Bytes that states will take on disk, before anything is spent: `tokens` tokens of which `supervised` are trained on.

    Per token m states of width d, an int64 id and a mask byte; per supervised token one last state, an int64 position and
    a float32 normaliser; per document a header.
    """
    return tokens * (8 + 1) + state_bytes(tokens * m, d, codec) + supervised * (8 + 4) + state_bytes(supervised, d, codec) + documents * HEADER_BYTES
