"""What the writers of foreign layouts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from firesteel.drafters.layer_json import layers_to_json
from firesteel.errors import CheckpointError
from firesteel.package.config_json import dtype_name
from firesteel.package.convert.foreign import Foreign
from firesteel.package.keys import EMBED, HEAD


@dataclass(frozen=True)
class Written:
    """config.json and tensors of a foreign layout, and what the user should know."""

    data: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


def refuse(layout: str, found: Foreign, wanted: Mapping[str, tuple[Any, ...]], *, whole_vocabulary: bool = True) -> None:
    """Refuse a drafter that the layout has no words for.

    Raises:
        CheckpointError: names the field with both values.
    """
    c = found.config
    for name, values in wanted.items():
        value = getattr(c, name)
        if value not in values:
            raise CheckpointError(
                f"{name} is {value!r}, but the {layout} layout of {c.algorithm} has {' or '.join(map(repr, values))}",
                mend="serve this drafter from the speculators format",
            )
    if whole_vocabulary and c.reduced_vocab:
        raise CheckpointError(
            f"draft_vocab_size is {c.draft_vocab_size} of {c.vocab_size}, but the {layout} layout of {c.algorithm} has the target's whole vocabulary",
            mend="serve this drafter from the speculators format",
        )


def layer_outputs(found: Foreign, target_layers: int | None, *, lowest: int) -> list[int]:
    """Captured layers as 0-based indices of the layers whose output is taken.

    Raises:
        CheckpointError: the layout's readers do not take such a layer.
    """
    ids = [i - 1 for i in found.config.layer_ids]
    if ids[0] < lowest:
        raise CheckpointError(f"layer_ids has {ids[0] + 1} (the embeddings), which readers of this layout do not capture", mend="use the speculators format")
    if target_layers is not None and ids[-1] >= target_layers - 1:
        raise CheckpointError(
            f"layer_ids has {ids[-1] + 1} of {target_layers} layers: readers of this layout take the last layer after the final norm, or refuse it",
            mend="use the speculators format",
        )
    return ids


def full_config(found: Foreign, architecture: str, target_layers: int | None, model_type: str = "qwen3") -> dict[str, Any]:
    """A Transformers config with the older names of RoPE beside the newer, since servers read one or the other.

    Raises:
        CheckpointError: nobody says how many layers the target has.
    """
    if target_layers is None:
        raise CheckpointError("this layout states the number of the target's layers, which the checkpoint does not", mend="give --target or target_layers=N")
    layers = layers_to_json(found.config, dtype_name(found.dtype), model_type)
    scaling = found.config.rope_scaling
    return {
        "architectures": [architecture],
        **layers,
        "rope_theta": found.config.rope_theta,
        "rope_scaling": None if scaling is None else dict(scaling),
        "num_target_layers": target_layers,
    }


def own_tables(found: Foreign, embed: Tensor | None, head: Tensor | None) -> dict[str, Tensor]:
    """Embedding and LM head for the file: the drafter's own, or else the given ones of the target."""
    own_embed = found.embed if found.embed is not None else embed
    own_head = found.head_rows if found.head_rows is not None else head
    return {name: t.detach().to("cpu", found.dtype) for name, t in ((EMBED, own_embed), (HEAD, own_head)) if t is not None}


def block_tensors(found: Foreign, embed: Tensor | None, head: Tensor | None) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """A block drafter's tensors under their own names, with tables; and a note if a calibration stays behind."""
    lost = found.contract is not None and found.contract.temperatures
    notes = ("the layout has no place for the calibrated temperatures of the confidence head",) if lost else ()
    return found.tensors | own_tables(found, embed, head), notes
