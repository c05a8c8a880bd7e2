"""The layouts, found by what config.json declares: never by names of tensors or folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firesteel.errors import CheckpointError
from firesteel.package.convert import deepspec, dflash, eagle3, speculators
from firesteel.package.convert.fields import Fields
from firesteel.package.convert.foreign import Foreign


@dataclass(frozen=True)
class Layout:
    """A layout that can be read; `architectures` are those that declare it."""

    name: str
    title: str
    architectures: tuple[str, ...]
    read: Callable[[Path, Fields], Foreign]


LAYOUTS = (
    Layout(speculators.NAME, "speculators format", (), speculators.read),
    Layout(deepspec.NAME, "DeepSpec", (deepspec.DSPARK, deepspec.EAGLE3), deepspec.read),
    Layout(dflash.NAME, "DFlash or DSpark with dflash_config (z-lab, SpecForge, SGLang)", (dflash.DFLASH, dflash.DSPARK), dflash.read),
    Layout(eagle3.NAME, "EAGLE-3 (SafeAILab, SpecForge, SGLang)", (eagle3.ARCHITECTURE,), eagle3.read),
)


def detect(data: dict[str, Any], where: str) -> Layout:
    """The layout that a config.json declares.

    Raises:
        CheckpointError: none that is known; says what the file declares.
    """
    if "speculators_model_type" in data:
        return LAYOUTS[0]
    declared = data.get("architectures")
    one = declared[0] if isinstance(declared, list) and len(declared) == 1 else None
    for layout in LAYOUTS:
        if one in layout.architectures and (layout.name == dflash.NAME) == ("dflash_config" in data):
            return layout
    # SafeAILab's own files call themselves plain Llamas; a draft vocabulary is what a Llama does not have.
    if one == "LlamaForCausalLM" and "draft_vocab_size" in data:
        return LAYOUTS[-1]
    known = ", ".join(a for layout in LAYOUTS for a in layout.architectures)
    extra = "without" if "dflash_config" not in data else "with"
    raise CheckpointError(
        f"{where}: architectures is {declared!r} {extra} dflash_config, a layout that Firesteel does not read",
        mend=f"it reads the speculators format and {known}",
    )
