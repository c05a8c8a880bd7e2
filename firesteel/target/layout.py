"""What a target's config.json alone says: enough to start a server for it, without loading any weights."""

from __future__ import annotations

from dataclasses import dataclass

import transformers

from firesteel import recipe as recipes
from firesteel.errors import TargetError
from firesteel.target.loading import resolve_target


@dataclass(frozen=True)
class Layout:
    """A target that is not loaded: where it is (folder or hub name), its layers, positions and width."""

    path: str
    num_layers: int
    max_positions: int
    hidden_size: int


def read_layout(settings: recipes.Target) -> Layout:
    """Read the target's config.

    Raises:
        TargetError: there is none, or it is not a language model's.
    """
    path = resolve_target(settings)
    try:
        whole = transformers.AutoConfig.from_pretrained(path, revision=settings.revision, trust_remote_code=settings.trust_remote_code)
        config = whole.get_text_config()
        return Layout(path, int(config.num_hidden_layers), int(getattr(config, "max_position_embeddings", 4096)), int(config.hidden_size))
    except (OSError, ValueError, AttributeError) as e:
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise TargetError(
            f"the config of target.model={settings.model} cannot be read: {first}", mend="give a folder or hub name of a causal language model"
        ) from e
