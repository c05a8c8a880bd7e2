"""Key tables: which tensors a checkpoint holds, with shapes and kinds.

The drafter's parameters carry the checkpoint's own names, so the same table speaks of a state dict and of a file.
What an algorithm trains is its own table (`DraftSpec.keys`); a reduced vocabulary adds the same to all.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from firesteel.drafters.config import DraftConfig
from firesteel.drafters.keys import Key
from firesteel.drafters.registry import get_spec, names
from firesteel.errors import CheckpointError

HEAD, D2T, T2D, EMBED = "lm_head.weight", "d2t", "t2d", "embed_tokens.weight"


def drafter_keys(config: DraftConfig) -> dict[str, Key]:
    """The trained tensors: the drafter's state dict.

    Raises:
        CheckpointError: the algorithm is unknown, or the heads do not belong to it.
    """
    check_algorithm(config)
    return get_spec(config.algorithm).keys(config)


def vocab_keys(config: DraftConfig) -> dict[str, Key]:
    """What a reduced vocabulary adds to the file: its rows of the target's LM head and both tables. Empty for a full vocabulary."""
    if not config.reduced_vocab:
        return {}
    small, large = config.draft_vocab_size, config.vocab_size
    return {HEAD: Key((small, config.hidden_size)), D2T: Key((small,), "index"), T2D: Key((large,), "mask")}


def check_algorithm(config: DraftConfig) -> None:
    """Refuse a configuration that contradicts its algorithm.

    Raises:
        CheckpointError: names the fields.
    """
    if config.algorithm not in names():
        raise CheckpointError(f"algorithm {config.algorithm!r} is unknown; known are {', '.join(names())}", mend="set drafter.algorithm")
    spec = get_spec(config.algorithm)
    if config.reduced_vocab and not spec.reduced_vocab:
        raise CheckpointError(
            f"a {config.algorithm} drafter has the target's whole vocabulary, but draft_vocab_size={config.draft_vocab_size} of {config.vocab_size}",
            mend="leave drafter.draft_vocab_size empty",
        )
    spec.check(config)


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Key], *, what: str) -> None:
    """Names and shapes must be exactly those of the table.

    Args:
        what: where the tensors come from; begins the error.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape.
    """
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"holds {_some(unknown)}, which the configuration does not know"] * bool(unknown)
        raise CheckpointError(f"{what} {' and '.join(parts)}", mend="weights and configuration come from different drafters, or a conversion dropped something")
    for name, key in wanted.items():
        if tuple(found[name].shape) != key.shape:
            raise CheckpointError(f"{what}: {name} has shape {list(found[name].shape)}, the configuration gives {list(key.shape)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
