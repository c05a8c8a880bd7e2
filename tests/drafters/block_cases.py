"""Small drafters and batches for the tests of the room."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from firesteel.batches.batch import Batch
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.config import FULL, SLIDING, DraftConfig

TINY = DraftConfig(
    algorithm="dspark",
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=50,
    target_hidden_size=24,
    layer_ids=(1, 3),
    block_size=4,
    mask_token_id=49,
    sample_from_anchor=True,
    layer_types=(FULL, FULL),
    markov_rank=6,
    confidence_head=True,
)
DFLASH = replace(TINY, algorithm="dflash", sample_from_anchor=False, markov_rank=0, confidence_head=False)
MIXED = replace(TINY, layer_types=(SLIDING, FULL), sliding_window=6)
REDUCED = replace(TINY, draft_vocab_size=17)
VARIANTS = {
    "dspark": TINY,
    "dflash": DFLASH,
    "sliding": replace(TINY, layer_types=(SLIDING, SLIDING), sliding_window=5),
    "mixed-causal": replace(MIXED, causal=True),
    "fill-in": replace(TINY, sample_from_anchor=False),
    "no-gqa": replace(TINY, num_kv_heads=4),
    "one-kv-head": replace(TINY, num_kv_heads=1),
    "gated-reduced": replace(REDUCED, markov_head="gated"),
    "rnn": replace(TINY, markov_head="rnn"),
    "rnn-fill-in": replace(TINY, markov_head="rnn", sample_from_anchor=False),
    "blind-confidence": replace(TINY, confidence_with_markov=False),
    "yarn": replace(TINY, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, max_position_embeddings=64),
}


def make_drafter(config: DraftConfig, seed: int = 0, *, dtype: torch.dtype = torch.float32) -> BlockDrafter:
    """A drafter in which every parameter is random and of a size that matters (zero-initialised heads would hide mistakes)."""
    torch.manual_seed(seed)
    drafter = BlockDrafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=max(parameter.shape[1] ** -0.5, 0.2))
    return drafter.to(dtype)


def make_tables(config: DraftConfig, seed: int = 1, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding `[V, h]`, head `[V_d, h]` and the target ids `[V_d]` of its rows."""
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(config.vocab_size, config.hidden_size, generator=generator).to(dtype)
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    head = torch.randn(config.vocab_size, config.hidden_size, generator=generator).to(dtype)[ids]
    return embed, head, ids


def make_batch(config: DraftConfig, lengths: list[int], anchors: list[int], seed: int = 2, *, dtype: torch.dtype = torch.float32) -> Batch:
    """Documents of these lengths, random tokens and states, anchors at these packed indices; all slots within a document predict."""
    generator = torch.Generator().manual_seed(seed)
    total, g = sum(lengths), config.block_size
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    at = torch.tensor(anchors)
    first = 0 if config.sample_from_anchor else 1
    slots = at[:, None] + torch.arange(g) + 1 - first
    inside = slots.clamp(max=total - 1)
    usable = (slots < total) & (document[inside] == document[at][:, None])
    usable[:, :first] = False
    slots = torch.where(usable, slots, -1)
    tokens = torch.randint(0, config.vocab_size - 1, (total,), generator=generator)
    context = torch.randn(total, len(config.layer_ids) * config.target_hidden_size, generator=generator).to(dtype)
    return Batch(
        token_ids=tokens,
        document=document,
        position=position,
        context=context,
        anchors=at,
        slots=slots,
        weights=usable.float(),
        target_last=torch.zeros(0, config.target_hidden_size),
        slot_target=torch.full_like(slots, -1),
        draft_labels=torch.where(usable, tokens[inside], -1),
    )
