"""Tensors of a target's files that Transformers leaves out when it loads the model, such as its MTP head."""

from __future__ import annotations

import json

from safetensors import SafetensorError, safe_open
from torch import Tensor

from firesteel import recipe as recipes
from firesteel.errors import TargetError
from firesteel.target.loading import INDEX, SINGLE, find_file, resolve_target


def read_native(settings: recipes.Target, prefix: str) -> dict[str, Tensor]:
    """All tensors whose names begin with `prefix`, by these names, as stored (CPU). Empty where there are none.

    Raises:
        TargetError: an index or a weights file cannot be read.
    """
    path = resolve_target(settings)
    index = find_file(path, INDEX, settings.revision)
    names: dict[str, list[str]] = {}
    try:
        if index is not None:
            for name, file in json.loads(index.read_text())["weight_map"].items():
                if name.startswith(prefix):
                    names.setdefault(file, []).append(name)
        else:
            names[SINGLE] = []
        found: dict[str, Tensor] = {}
        for file, wanted in names.items():
            weights = find_file(path, file, settings.revision)
            if weights is None:
                if index is None:
                    return {}
                raise TargetError(f"target.model={settings.model}: {file} is not there, but its index names it", mend="fetch the folder again")
            with safe_open(weights, framework="pt") as f:
                found |= {name: f.get_tensor(name) for name in (wanted or f.keys()) if name.startswith(prefix)}
    except (OSError, ValueError, KeyError, SafetensorError) as e:
        raise TargetError(f"target.model={settings.model}: its weights cannot be read: {e}", mend="fetch the folder again") from e
    return found
