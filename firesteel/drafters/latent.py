"""LatentDrafter: DSpark on layers of multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434), as vLLM 0.32 serves `k3_dspark`.

With `c_p = context_norm(context_proj(aux_p))` for context and `y = input_layernorm(x)` for the block, a layer has per position
    queries  q_j = W_QB,j norm(W_QA y) = [q_j^nope ; R(q_j^rope)]          head j, of the block only
    latent   [l ; r] = W_KVA u,   l <- norm(l)                              u = c for the context, y for the block
    keys     k_j = [W_UK,j l ; R(r)]     values v_j = W_UV,j l              r, the rotated part, is the same for all heads
and scores q_j . k_j / sqrt(nope + rope). R turns neighbouring pairs (2i, 2i+1). Every context position is seen, and the slots of a block
see each other. MLP, norms and residuals are those of `DraftLayer`; heads and loss those of DSpark. A server caches [l ; R(r)] alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.batches.batch import Batch
from firesteel.drafters.attention import Attend, Path, make_attend, make_geometry
from firesteel.drafters.block import mask_token
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.heads import ConfidenceHead, MarkovHead
from firesteel.drafters.init import init_random
from firesteel.drafters.latent_format import check_latent, latent_sizes, softmax_correction
from firesteel.drafters.layers import MLP, Projection, RMSNorm, Table
from firesteel.drafters.rope import Rope, rotate
from firesteel.drafters.rows import TrainingRows
from firesteel.kernels.linear import linear


class LatentAttention(nn.Module):
    """Projections of one layer. Parameter names are those of DeepSeek-V3's checkpoints."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        sizes = self.sizes = latent_sizes(config)
        self.heads = config.num_heads
        self.query_scale = softmax_correction(config)
        self.q_a_proj = nn.Linear(config.hidden_size, sizes.q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(sizes.q_rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(sizes.q_rank, self.heads * sizes.key, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, sizes.latent, bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.kv_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(sizes.kv_rank, self.heads * (sizes.nope + sizes.value), bias=False)
        self.o_proj = nn.Linear(self.heads * sizes.value, config.hidden_size, bias=False)

    def queries(self, x: Tensor, table: Table) -> Tensor:
        """`[..., h]` -> `[..., H, nope + rope]`, rotated, with YaRN's correction of the softmax on them."""
        q = linear(self.q_a_layernorm(linear(x, self.q_a_proj.weight)), self.q_b_proj.weight).unflatten(-1, (self.heads, self.sizes.key))
        plain, turned = q.split([self.sizes.nope, self.sizes.rope], dim=-1)
        return torch.cat([plain, rotate_pairs(turned, table)], dim=-1) * self.query_scale

    def latents(self, x: Tensor, table: Table) -> tuple[Tensor, Tensor]:
        """`[..., h]` -> latent `[..., kv_rank]`, normalised, and the shared part of the keys `[..., rope]`, rotated."""
        latent, shared = linear(x, self.kv_a_proj_with_mqa.weight).split([self.sizes.kv_rank, self.sizes.rope], dim=-1)
        return self.kv_a_layernorm(latent), rotate_pairs(shared.unsqueeze(-2), table).squeeze(-2)

    def keys_values(self, x: Tensor, table: Table) -> tuple[Tensor, Tensor]:
        """`[..., h]` -> keys `[..., H, nope + rope]` and values `[..., H, value]`; the same for context and block."""
        latent, shared = self.latents(x, table)
        both = linear(latent, self.kv_b_proj.weight).unflatten(-1, (self.heads, self.sizes.nope + self.sizes.value))
        plain, values = both.split([self.sizes.nope, self.sizes.value], dim=-1)
        return torch.cat([plain, shared.unsqueeze(-2).expand(*plain.shape[:-1], -1)], dim=-1), values

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """`W_UK [H, nope, kv_rank]` and `W_UV [H, value, kv_rank]`, views of `kv_b_proj` that a decoder folds into queries and outputs."""
        both = self.kv_b_proj.weight.unflatten(0, (self.heads, self.sizes.nope + self.sizes.value))
        return both[:, : self.sizes.nope], both[:, self.sizes.nope :]


class LatentLayer(nn.Module):
    """One decoder layer over block inputs; context features enter its latents as they are (no layer norm of their own)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = LatentAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, block_table: Table, context_table: Table, attend: Attend) -> Tensor:
        """`x [N, g, h]`, context features `[T, h]`, RoPE tables of both -> `[N, g, h]`."""
        y, sizes = self.input_layernorm(x), self.self_attn.sizes
        queries = self.self_attn.queries(y, block_table)
        (ck, cv), (bk, bv) = self.self_attn.keys_values(context, context_table), self.self_attn.keys_values(y, block_table)
        # Attention takes keys and values of one width; zeros behind a value come out as zeros.
        mixed = attend(queries, (ck, _widen(cv, sizes.key)), (bk, _widen(bv, sizes.key)))[..., : sizes.value]
        x = x + linear(mixed.flatten(-2), self.self_attn.o_proj.weight)
        return x + self.mlp(self.post_attention_layernorm(x))


class LatentDrafter(nn.Module):
    """A drafter of blocks on MLA layers, freshly initialised.

    Args:
        config: shape and contract; its `extra` holds the latent sizes (see `latent_format`).

    Raises:
        CheckpointError: the config asks for what this backbone does not have.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        check_latent(config)
        self.config = config
        self.rope = Rope(config)  # `head_dim` of the config is the rotated part
        self.context_proj = Projection(len(config.layer_ids) * config.target_hidden_size, config.hidden_size)
        self.context_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([LatentLayer(config) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        init_random(self)

    def training_rows(self, batch: Batch, embed: Tensor, head: Tensor, *, attention: Path = "auto") -> TrainingRows:
        """Teacher-forced forward pass over all blocks of a batch.

        Args:
            batch: T packed tokens, N blocks of g slots.
            embed: `[V, h]` the target's embedding.
            head: `[V, h]` the target's LM head.
            attention: implementation; all give the same up to rounding.
        """
        z = self.states(batch, embed, attention)
        e = self.markov_head.embed(batch.previous_tokens(self.config.sample_from_anchor))
        rows = self.markov_head.rows(z, e, first=0)
        pieces = [(z.flatten(0, 1), head), (rows.flatten(0, 1), self.markov_head.markov_w2.weight)]
        return TrainingRows(pieces, None if self.confidence_head is None else self.confidence_head(z, e), z)

    def states(self, batch: Batch, embed: Tensor, attention: Path = "auto") -> Tensor:
        """Final hidden states `[N, g, h]` of all slots."""
        dtype, g = self.context_proj.weight.dtype, batch.block_size
        positions = batch.position[batch.anchors][:, None] + torch.arange(g, device=batch.anchors.device)
        block_table, context_table = self.rope.table(positions, dtype), self.rope.table(batch.context_position, dtype)
        context = self.context_norm(self.context_proj(batch.context.to(dtype)))
        ids = batch.anchors.new_full((batch.anchors.shape[0], g), mask_token(self.config))
        ids[:, 0] = batch.token_ids[batch.anchors]
        x = F.embedding(ids, embed).to(dtype)
        attend = make_attend(attention, make_geometry(batch, None, self.config.causal), batch.share)
        for layer in self.layers:
            x = layer(x, context, block_table, context_table, attend)
        return self.final_norm(x)


def rotate_pairs(x: Tensor, table: Table) -> Tensor:
    """Turn pairs (2i, 2i + 1) of `x [..., heads, D]`. They come out as (i, i + D/2): an order that dot products do not see."""
    return rotate(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1), table)


def _widen(values: Tensor, width: int) -> Tensor:
    return F.pad(values, (0, width - values.shape[-1]))
