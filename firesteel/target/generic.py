"""Decoding engines that run a target through Transformers' own forward pass.

`GenericDecoder` crops the cache after a rejected draft. A recurrent state (delta-net, KDA, Mamba) holds no positions to cut off, so
`RecurrentDecoder` copies it before every pass; to go back it puts the copy in place and reads the accepted tokens once more.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from firesteel.errors import TargetError
from firesteel.target.local import capture, stack_layers

_CROPPABLE = (DynamicLayer, DynamicIndexedLayer)


def new_cache(model: Any) -> DynamicCache:
    """An empty cache of the kinds that the model's layers need.

    Sliding layers, too, keep every position, so that any length can be returned to; the attention mask alone applies their window.

    Raises:
        TargetError: Transformers has no cache for a kind of layer.
    """
    try:
        cache = DynamicCache(config=model.config.get_text_config())
    except (KeyError, ValueError) as e:
        raise TargetError(f"Transformers has no cache for the layers of this target: {e}", mend="use a target whose layers it can decode step by step") from e
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def has_states(model: Any) -> bool:
    """Whether some layer's cache cannot be cropped."""
    return any(type(layer) not in _CROPPABLE for layer in new_cache(model).layers)


class GenericDecoder:
    """Any Transformers causal model with a cache that can be cropped.

    Args:
        model: in evaluation mode.
        layer_ids: captured layers, as in `hidden_states` (0 = embeddings, number of layers = before the final norm).
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.model = model
        self.layer_ids = tuple(layer_ids)
        self.trims_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.cache = new_cache(model)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start: int, keep: int) -> tuple[Tensor, Tensor]:
        """Run `tokens` `[n]` after the first `start` cached positions, forgetting any later ones.

        Returns:
            logits `[keep, V]` of the last `keep` tokens, captured states `[n, m * d]`.
        """
        self._return_to(start)
        return self._run(tokens, keep)

    def fork(self) -> Self:
        """The same model with an empty cache."""
        return type(self)(self.model, self.layer_ids)

    def _return_to(self, start: int) -> None:
        surplus = self.cache.get_seq_length() - start
        if start == 0:
            self.cache = new_cache(self.model)
        elif surplus > 0:
            self.cache.crop(-surplus)

    def _run(self, tokens: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        with capture(self.model, self.layer_ids) as states:
            trim = {"logits_to_keep": keep} if self.trims_logits else {}
            logits = self.model(tokens[None], past_key_values=self.cache, use_cache=True, **trim).logits[0, -keep:]
        return logits, stack_layers(states, self.layer_ids)[0].flatten(1)


class RecurrentDecoder(GenericDecoder):
    """A model with layers whose cache is a state, whole or in part.

    Going back to where the last pass began or later costs a pass over the accepted tokens; going further back reads the text anew.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        super().__init__(model, layer_ids)
        self._seen = torch.empty(0, dtype=torch.long)
        self._begin = 0
        self._states: dict[int, Any] = {}

    def _run(self, tokens: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        self._begin = len(self._seen)
        self._states = {i: copy.deepcopy(layer) for i, layer in enumerate(self.cache.layers) if type(layer) not in _CROPPABLE}
        self._seen = torch.cat([self._seen.to(tokens.device), tokens])
        return super()._run(tokens, keep)

    def _return_to(self, start: int) -> None:
        if start == len(self._seen):
            return
        again = self._seen[:start]
        if start == 0 or start < self._begin:
            self.cache = new_cache(self.model)
            self._seen = again[:0]
        else:
            for i, layer in enumerate(self.cache.layers):
                if i in self._states:
                    self.cache.layers[i] = self._states[i]
                else:
                    layer.crop(self._begin - len(self._seen))
            self._seen = again[: self._begin]
        if len(again) > len(self._seen):
            self._run(again[len(self._seen) :], 1)
