"""A short name for the weights in a model's files: server and trainer compare it, so that states are never those of another model.

Reads headers of the safetensors files and a few windows of their data; how weights are spread over files does not count.
Imported inside vLLM: no training code here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_TENSORS, _WINDOWS, _BYTES = 256, 4, 64


def weights_digest(model: str, revision: str | None = None) -> str | None:
    """Hash over names, dtypes and shapes of all tensors and over samples of up to 256 of them; None where there are no safetensors to read.

    Args:
        model: a folder, or a hub name that is in the local cache.
    """
    folder = _folder(model, revision)
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    if not files:
        return None
    found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in files:
        try:
            with path.open("rb") as f:
                length = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(length))
        except (OSError, ValueError):
            return None
        header.pop("__metadata__", None)
        found.update({name: (path, 8 + length, entry) for name, entry in header.items()})
    digest = hashlib.blake2b(digest_size=12)
    names = sorted(found)
    for name in names:
        digest.update(f"{name} {found[name][2]['dtype']} {found[name][2]['shape']};".encode())
    for i in range(min(_TENSORS, len(names))):
        path, start, entry = found[names[i * len(names) // min(_TENSORS, len(names))]]
        first, end = entry["data_offsets"]
        with path.open("rb") as f:
            for k in range(_WINDOWS):
                at = first + (end - first) * k // _WINDOWS
                f.seek(start + at)
                digest.update(f.read(min(_BYTES, end - at)))
    return digest.hexdigest()


def _folder(model: str, revision: str | None) -> Path | None:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not a name that the hub could have
        return None
    return Path(config).parent if isinstance(config, str) else None
