"""BlockDrafter: the DFlash backbone, and with heads on it DSpark.

Context features `c_p = hidden_norm(fc(aux_p))` enter keys and values of every layer; the block itself is the anchor's embedding
followed by the mask token's. Embedding and LM head are the target's: they are passed in, and no parameter of this module.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.batches.batch import Batch
from firesteel.drafters.attention import Attend, Path, make_attend, make_geometry
from firesteel.drafters.config import SLIDING, DraftConfig
from firesteel.drafters.heads import ConfidenceHead, MarkovHead
from firesteel.drafters.init import init_random
from firesteel.drafters.layers import DraftLayer, Projection, RMSNorm, check_layers
from firesteel.drafters.rope import Rope
from firesteel.drafters.rows import TrainingRows
from firesteel.errors import CheckpointError, RecipeError


class BlockDrafter(nn.Module):
    """A drafter of blocks, freshly initialised. `layer_class` is what its layers are made of.

    Args:
        config: shape and contract.

    Raises:
        RecipeError, CheckpointError: the config asks for what does not exist.
    """

    layer_class: type[DraftLayer] = DraftLayer

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.rope = Rope(config)
        self.fc = Projection(len(config.layer_ids) * config.target_hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([self.layer_class(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        init_random(self)

    def training_rows(self, batch: Batch, embed: Tensor, head: Tensor, *, attention: Path = "auto") -> TrainingRows:
        """Teacher-forced forward pass over all blocks of a batch.

        Args:
            batch: T packed tokens, N blocks of g slots.
            embed: `[V, h]` the target's embedding.
            head: `[V_d, h]` rows of the target's LM head.
            attention: implementation; all give the same up to rounding.
        """
        z = self.states(batch, embed, attention)
        pieces = [(z.flatten(0, 1), head)]
        e: Tensor | None = None
        if self.markov_head is not None:
            e = self.markov_head.embed(batch.previous_tokens(self.config.sample_from_anchor))
            pieces.append((self.markov_head.rows(z, e, first=0 if self.config.sample_from_anchor else 1).flatten(0, 1), self.markov_head.markov_w2.weight))
        confidence = None if self.confidence_head is None else self.confidence_head(z, e)
        return TrainingRows(pieces, confidence, z)

    def states(self, batch: Batch, embed: Tensor, attention: Path = "auto") -> Tensor:
        """Final hidden states `[N, g, h]` of all slots."""
        dtype, g = self.fc.weight.dtype, batch.block_size
        positions = batch.position[batch.anchors][:, None] + torch.arange(g, device=batch.anchors.device)
        block_table, context_table = self.rope.table(positions, dtype), self.rope.table(batch.context_position, dtype)
        context = self.hidden_norm(self.fc(batch.context.to(dtype)))
        x = self.block_inputs(batch.token_ids[batch.anchors], embed, g)
        attends: dict[str, Attend] = {}
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            if kind not in attends:
                window = self.config.sliding_window if kind == SLIDING else None
                attends[kind] = make_attend(attention, make_geometry(batch, window, self.config.causal), batch.share)
            x = layer(x, context, block_table, context_table, attends[kind])
        return self.norm(x)

    def block_inputs(self, anchors: Tensor, embed: Tensor, block_size: int) -> Tensor:
        """Anchor tokens `[N]` -> `[N, g, h]`: the anchor's embedding, then the mask token's."""
        ids = anchors.new_full((anchors.shape[0], block_size), mask_token(self.config))
        ids[:, 0] = anchors
        return F.embedding(ids, embed).to(self.fc.weight.dtype)


def mask_token(config: DraftConfig) -> int:
    """The token of unknown slots.

    Raises:
        CheckpointError: there is none.
    """
    if config.mask_token_id is None:
        raise CheckpointError(f"a {config.algorithm} drafter needs a mask token, but mask_token_id is None", mend="set drafter.mask_token_id")
    return config.mask_token_id


def _check(config: DraftConfig) -> None:
    mask_token(config)
    check_layers(config)
    if SLIDING in config.layer_types and config.block_size > config.sliding_window:
        raise RecipeError(
            f"drafter.sliding_window={config.sliding_window} is shorter than a block of {config.block_size}",
            mend="set drafter.sliding_window higher or drafter.block_size lower",
        )
