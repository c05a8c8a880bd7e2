"""A drafter that Firesteel does not know: token k + 1 from token k alone, through one matrix between embedding and LM head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.batches.batch import Batch
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.keys import Key
from firesteel.drafters.layer_json import LayerFields, ReadStrictly
from firesteel.drafters.registry import DraftSpec, register
from firesteel.drafters.rows import Draft, TrainingRows
from firesteel.errors import RecipeError


class Bigram(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.mix = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def states(self, tokens: Tensor, embed: Tensor) -> Tensor:
        return self.mix(embed[tokens]) * self.config.extra["scale"]

    def training_rows(self, batch: Batch, embed: Tensor, head: Tensor) -> TrainingRows:
        z = self.states(batch.previous_tokens(True), embed)
        return TrainingRows([(z.flatten(0, 1), head)], None, z)


class BigramSession:
    def __init__(
        self,
        drafter: Bigram,
        embed: Tensor,
        head: Tensor,
        *,
        draft_to_target: Tensor | None,
        max_length: int,
        confidence_temperatures: Sequence[float] | None = None,
    ) -> None:
        self.drafter, self.embed, self.head, self.ids = drafter, embed, head, draft_to_target

    def observe(self, tokens: Sequence[int] | Tensor, aux: Tensor) -> None:
        assert len(tokens) == len(aux)

    def rewind(self, length: int) -> None:
        assert length >= 0

    def fork(self) -> BigramSession:
        return copy.copy(self)

    @torch.inference_mode()
    def draft(self, anchor: int, count: int, *, temperature: float = 0.0, generator: torch.Generator | None = None) -> Draft:
        tokens: list[int] = []
        probs: list[Tensor] = []
        for _ in range(count):
            logits = self.drafter.states(torch.tensor(tokens[-1] if tokens else anchor), self.embed) @ self.head.T
            if temperature > 0:
                probs.append((logits / temperature).softmax(-1))
                choice = int(torch.multinomial(probs[-1], 1, generator=generator))
            else:
                choice = int(logits.argmax())
            tokens.append(choice if self.ids is None else int(self.ids[choice]))
        return Draft(tokens, torch.stack(probs) if probs else None, None)

    def expand(self, probs: Tensor) -> Tensor:
        return probs if self.ids is None else probs.new_zeros(len(probs), self.drafter.config.vocab_size).index_copy_(1, self.ids, probs)


class BigramFields(ReadStrictly):
    aux_layers: tuple[int, ...]
    block: int
    scale: float


def options(settings: recipes.Drafter) -> dict[str, Any]:
    unknown = settings.options.keys() - {"scale"}
    if unknown:
        raise RecipeError(f"drafter.options has {sorted(unknown)[0]}, which bigram does not know", mend="it knows scale")
    return {"scale": float(settings.options.get("scale", 1.0))}


def from_json(own: BigramFields, layers: LayerFields, where: str) -> dict[str, Any]:
    return {
        "layer_ids": own.aux_layers,
        "block_size": own.block,
        "mask_token_id": None,
        "sample_from_anchor": True,
        "causal": True,
        "extra": {"scale": own.scale},
    }


register(
    DraftSpec(
        name="bigram",
        title="Bigram",
        architecture="BigramDraftModel",
        build=Bigram,
        session=BigramSession,
        keys=lambda config: {"mix.weight": Key((config.hidden_size, config.hidden_size))},
        schema=BigramFields,
        to_json=lambda config: {"aux_layers": list(config.layer_ids), "block": config.block_size, "scale": config.extra["scale"]},
        from_json=from_json,
        options=options,
        causal=True,
        masks=False,
        method="bigram",
    )
)
