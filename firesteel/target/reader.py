"""Readers run whole texts through a target's layers and keep the residual streams that a drafter learns from.

Llama-like float32 targets on a CPU read texts one behind the other in one flat batch (`PagedTarget`), every other target reads them side by side through its
own forward pass, padded on the right: with causal attention padding changes nothing before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from firesteel.kernels.linear import preferred
from firesteel.kernels.paged import BLOCK, blocks_for
from firesteel.kernels.spans import Span
from firesteel.target.head import decoder
from firesteel.target.lean import lean_refusal
from firesteel.target.local import capture, stack_layers
from firesteel.target.paged import PagedTarget, open_paged
from firesteel.target.session import fast_twin

Read = tuple[Tensor, Tensor]
"""Of one text of T tokens: captured states `[T, m, d]`, and the states before the final norm `[T, d]`."""


class Reader(Protocol):
    """Reads texts together."""

    def __call__(self, texts: Sequence[Sequence[int]]) -> list[Read]:
        """What every text left, in the model's dtype, on its device."""


def make_reader(model: Any, layer_ids: Sequence[int], *, half: bool = False) -> Reader:
    """The fastest reader of this target.

    Args:
        layer_ids: captured layers, as in `hidden_states`.
        half: products of a float32 target on a CPU run in bfloat16.
    """
    if lean_refusal(model, 1) is None and (half or preferred() == "onednn"):
        return FlatReader(model, layer_ids, half=half)
    return _padded(model, layer_ids, half)


class PaddedReader:
    """Through `model`'s own forward pass."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.model, self.layer_ids = model, tuple(layer_ids)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]]) -> list[Read]:
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.as_tensor(text)
        with capture(self.model, self.layer_ids) as states:
            # The LM head is the caller's, who knows where it is wanted.
            self.model(ids.to(self.model.device), use_cache=False, logits_to_keep=1)
        aux, last = stack_layers(states, self.layer_ids), states["last"]
        return [(aux[i, : len(text)], last[i, : len(text)]) for i, text in enumerate(texts)]


class FlatReader:
    """One text behind the other, through packed layers; as `PaddedReader` where those turn out not to be the model's own."""

    def __init__(self, model: Any, layer_ids: Sequence[int], *, half: bool = False) -> None:
        self.model, self.layer_ids, self.half = model, tuple(layer_ids), half
        self._end = len(decoder(model).layers)
        self._paged: PagedTarget | None = None
        self._padded: PaddedReader | None = None

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]]) -> list[Read]:
        paged = self._room(texts)
        if paged is None:
            self._padded = self._padded or _padded(self.model, self.layer_ids, self.half)
            return self._padded(texts)
        spans, used = [], 0
        for i, text in enumerate(texts):
            count = blocks_for(len(text))
            spans.append(Span(i, list(range(used, used + count)), 0, len(text)))
            used += count
        tokens = torch.cat([torch.as_tensor(text) for text in texts])
        _, states = paged.forward(tokens, spans, [0] * len(spans))
        streams = states.view(len(tokens), len(paged.layer_ids), -1)
        last = streams[:, paged.layer_ids.index(self._end)]
        sizes = [len(text) for text in texts]
        return list(zip(streams[:, : len(self.layer_ids)].split(sizes), last.split(sizes), strict=True))

    def _room(self, texts: Sequence[Sequence[int]]) -> PagedTarget | None:
        longest, blocks = max(map(len, texts)), sum(blocks_for(len(text)) for text in texts)
        if self._padded is None and self._paged is None:
            ids = self.layer_ids if self._end in self.layer_ids else (*self.layer_ids, self._end)
            self._paged = open_paged(self.model, ids, max_length=max(longest, BLOCK), blocks=max(4, blocks), half=self.half)
        if self._paged is None or lean_refusal(self.model, longest) is not None:
            self._paged = None
            return None
        self._paged.make_room(longest, blocks)
        return self._paged


def _padded(model: Any, layer_ids: Sequence[int], half: bool) -> PaddedReader:
    return PaddedReader(fast_twin(model, half=half), layer_ids)
