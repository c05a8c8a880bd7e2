"""P-EAGLE (arXiv 2602.01469): EAGLE-3's chain in one pass, with a learned state and a mask token where tokens and features are not known yet.

Slot 0 is the anchor's pair; slot k > 0 pairs the mask token's embedding with `fc(mask_hidden)`. A slot sees the pairs before the anchor, and
slots up to its own. Its output predicts the token k + 1 after the anchor.

Conditional-drop sampling makes training cheap: of N anchors `N r^d` keep a slot at depth d (never less than a floor), and a chain that has
lost a slot has none behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firesteel.batches.anchors import seeded
from firesteel.batches.batch import Batch
from firesteel.drafters.attention import Path
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.eagle import EagleDrafter, EagleLayer, Streams, attends
from firesteel.drafters.eagle_session import EagleSession
from firesteel.drafters.rows import Draft, TrainingRows
from firesteel.errors import CheckpointError


class PEagleDrafter(EagleDrafter):
    """A drafter of blocks from pairs.

    Raises:
        CheckpointError: the config asks for what does not exist.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        if config.mask_token_id is None:
            raise CheckpointError("a peagle drafter needs a mask token, but mask_token_id is None", mend="set drafter.mask_token_id")
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.layer_ids) * config.target_hidden_size))

    def training_rows(self, batch: Batch, embed: Tensor, head: Tensor, *, attention: Path = "auto") -> TrainingRows:
        """As the base class; in training mode dropped slots are not computed, and `kept` says which were."""
        if not self.training:
            return super().training_rows(batch, embed, head, attention=attention)
        # A foreign checkpoint says nothing of how it was trained: then nothing is dropped.
        extra = self.config.extra
        lengths = chain_lengths(batch, float(extra.get("drop_ratio", 1.0)), float(extra.get("drop_floor", 1.0)))
        z = self._states(batch, embed, attention, lengths)
        kept = torch.arange(batch.block_size, device=lengths.device) < lengths[:, None]
        return TrainingRows([(z.flatten(0, 1), head)], None, z, kept=kept)

    def block_states(self, batch: Batch, embed: Tensor, attention: Path) -> Tensor:
        """States `[N, g, h]` of all slots."""
        return self._states(batch, embed, attention, batch.anchors.new_full((batch.anchors.shape[0],), batch.block_size))

    def _states(self, batch: Batch, embed: Tensor, attention: Path, lengths: Tensor) -> Tensor:
        """States `[N, g, h]` after the last norm; zero behind the first `lengths [N]` slots of a chain.

        Chains of one length are computed side by side as blocks of that length.
        """
        dtype, g, h = self.fc.weight.dtype, batch.block_size, self.config.hidden_size
        pairs = self.pairs(batch, embed)
        context = self.context(batch, pairs, self.rope.table(batch.position, dtype), attention)
        masked = self.mask_pair(embed)
        out = pairs[1].new_zeros(batch.anchors.shape[0], g, h)
        for length in lengths.unique().tolist():
            chosen = (lengths == length).nonzero()[:, 0]
            anchors = batch.anchors[chosen]
            table = self.rope.table(batch.position[anchors][:, None] + torch.arange(length, device=anchors.device), dtype)
            first = (pairs[0][anchors][:, None], pairs[1][anchors][:, None])
            stream: Tensor | Streams = (
                torch.cat([first[0], masked[0].expand(len(chosen), length - 1, h)], dim=1),
                torch.cat([first[1], masked[1].expand(len(chosen), length - 1, h)], dim=1),
            )
            for i, (layer, attend) in enumerate(zip(self.layers, attends(self, batch, anchors, length, length, attention), strict=True)):
                assert isinstance(layer, EagleLayer)
                y, residual = layer.enter(stream)
                mixed = attend(layer.self_attn.queries(y, table), context[i], layer.self_attn.keys_values(y, table))
                stream = layer.leave(residual, mixed)
            assert isinstance(stream, Tensor)
            out = out.index_put((chosen[:, None], torch.arange(length, device=chosen.device)), self.norm(stream))
        return out

    def mask_pair(self, embed: Tensor) -> Streams:
        """The pair of an unknown token: embedding and feature, `[1, 1, h]` each."""
        token = torch.full((1, 1), self.mask_token_id, device=self.fc.weight.device)
        return self.embed(token, embed), self.features(self.mask_hidden)


class PEagleSession(EagleSession):
    """Drafts a whole block in one pass."""

    def _chain(self, anchor: int, count: int, temperature: float, generator: torch.Generator | None) -> Draft:
        drafter = self.drafter
        assert isinstance(drafter, PEagleDrafter)
        masked = drafter.mask_pair(self._embed)
        first = self._embedded(torch.tensor([anchor], device=self.device))
        pairs = (
            torch.cat([first, masked[0][0].expand(count - 1, -1)]),
            torch.cat([self._features[self.length - 1 : self.length], masked[1][0].expand(count - 1, -1)]),
        )
        logits = self._head(drafter.norm(self._run(pairs, self.length)))
        picked = [self._pick(row, temperature, generator) for row in logits]
        probs = [p for _, p in picked if p is not None]
        return Draft([token for token, _ in picked], torch.stack(probs) if probs else None, None)


def chain_lengths(batch: Batch, ratio: float, floor: float) -> Tensor:
    """How many slots each chain keeps, `[N]` int64, 1 to g: at depth d the longest `max(ratio^d, floor)` share of the chains is alive.

    The draw depends on the batch alone (its anchors), so that a resumed run draws the same.
    """
    n, g = batch.slots.shape
    shares = [max(ratio**depth, floor) for depth in range(1, g)]
    alive = [max(1, round(n * share)) for share in shares]
    order = torch.randperm(n, generator=seeded(n, g, int(batch.anchors.sum()), int(batch.token_ids.sum())))
    lengths = torch.ones(n, dtype=torch.long)
    for count in alive:
        lengths[order[:count]] += 1
    return lengths.to(batch.anchors.device)
