"""What EAGLE-3 (arXiv 2503.01840) and P-EAGLE (arXiv 2602.01469) share: pairs of a token and the state before it, and their layers.

Pair i joins the token x_i with the feature `f_{i-1} = fc(aux_{i-1})`, the target's captured states at the position before; a document's
first token has none. The first layer's attention reads both side by side, each under its own norm, and its residual stream is the
feature's. Pair i stands at position i (what RoPE sees), and its output predicts x_{i+1}.

As a block: the anchor's pair is slot 0 and the pairs before it are the context. Slot k > 0 follows it in the way of the algorithm.
Embedding and LM head are the target's and frozen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.batches.batch import Batch
from firesteel.drafters.attention import Attend, Geometry, Path, make_attend
from firesteel.drafters.config import SLIDING, DraftConfig
from firesteel.drafters.init import init_random
from firesteel.drafters.layers import MLP, Attention, RMSNorm, Table, check_layers
from firesteel.drafters.rope import Rope
from firesteel.drafters.rows import TrainingRows
from firesteel.errors import CheckpointError
from firesteel.kernels.linear import linear

LAYER_STYLES = ("llama", "qwen3")
Streams = tuple[Tensor, Tensor]
"""Input of the first layer: embeddings `[..., h]` and features `[..., h]`."""


class EagleLayer(nn.Module):
    """A decoder layer; the first one reads embedding and feature side by side.

    Args:
        first: whether it is the first.
    """

    def __init__(self, config: DraftConfig, *, first: bool) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = bool(config.extra["norm_before_residual"])
        self.self_attn = Attention(config, 2 * h if first else None, qk_norm=config.extra["layer_style"] == "qwen3")
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(h, eps)
        self.hidden_norm = RMSNorm(h, eps) if first else None
        self.post_attention_layernorm = RMSNorm(h, eps)

    def enter(self, x: Tensor | Streams) -> tuple[Tensor, Tensor]:
        """Input -> what the attention reads `[..., h or 2h]`, and the residual `[..., h]`."""
        if isinstance(x, Tensor):
            return self.input_layernorm(x), x
        assert self.hidden_norm is not None, "only the first layer reads pairs"
        embedding, feature = x
        normed = self.hidden_norm(feature)
        return torch.cat([self.input_layernorm(embedding), normed], dim=-1), normed if self.norm_before_residual else feature

    def leave(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Residual `[..., h]` and attended values `[..., H, D]` -> `[..., h]`."""
        x = residual + self.self_attn.out(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleDrafter(nn.Module, ABC):
    """Backbone of both algorithms, freshly initialised; `block_states` is each one's own.

    Raises:
        CheckpointError: the config asks for what does not exist.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        check_eagle(config)
        self.config = config
        h, wide = config.target_hidden_size, len(config.layer_ids) * config.target_hidden_size
        self.rope = Rope(config)
        self.input_norm = RMSNorm(wide, config.rms_norm_eps) if config.extra["norm_before_fc"] else None
        self.fc_norm = nn.ModuleList([RMSNorm(h, config.rms_norm_eps) for _ in config.layer_ids]) if config.extra["fc_norm"] else None
        self.fc = nn.Linear(wide, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([EagleLayer(config, first=i == 0) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        init_random(self)

    def training_rows(self, batch: Batch, embed: Tensor, head: Tensor, *, attention: Path = "auto") -> TrainingRows:
        """Forward pass over all blocks of a batch, each slot given the true tokens before it.

        Args:
            batch: T packed tokens, N blocks of g slots.
            embed: `[V, h]` the target's embedding.
            head: `[V_d, h]` rows of the target's LM head.
            attention: implementation; all give the same up to rounding.
        """
        z = self.block_states(batch, embed, attention)
        return TrainingRows([(z.flatten(0, 1), head)], None, z)

    @abstractmethod
    def block_states(self, batch: Batch, embed: Tensor, attention: Path) -> Tensor:
        """States `[N, g, h]` of all slots after the last norm."""
        ...

    def features(self, aux: Tensor) -> Tensor:
        """Captured states `[..., m * d]` -> features `[..., h]`."""
        aux = aux.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, aux.chunk(len(self.fc_norm), dim=-1), strict=True)], dim=-1)
        return linear(aux, self.fc.weight)

    def pairs(self, batch: Batch, embed: Tensor) -> Streams:
        """Pair i of every packed token; those of first tokens are made of a wrong feature, and nobody may see them."""
        features = self.features(batch.context)
        return self.embed(batch.token_ids, embed), features.roll(1, dims=0)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Token ids `[...]` -> `[..., h]` in the drafter's dtype."""
        return F.embedding(tokens, table).to(self.fc.weight.dtype)

    def context(self, batch: Batch, x: Streams, table: Table, attention: Path) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[T, Hkv, D]` of all pairs, for every layer.

        Layers after the first need the context's own states, so with more than one layer every pair of the batch is run through all but the last.
        """
        found: list[tuple[Tensor, Tensor]] = []
        stream: Tensor | Streams = x
        everywhere = torch.arange(batch.token_ids.shape[0], device=batch.token_ids.device)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, EagleLayer)
            y, residual = layer.enter(stream)
            keys, values = layer.self_attn.keys_values(y, table)
            found.append((keys, values))
            if i + 1 < len(self.layers):
                attend = make_attend(attention, self.geometry(batch, everywhere, 1, 1, i))
                mixed = attend(layer.self_attn.queries(y, table)[:, None], (keys, values), (keys[:, None], values[:, None]))
                stream = layer.leave(residual, mixed[:, 0])
        return found

    def geometry(self, batch: Batch, anchors: Tensor, slots: int, queries: int, layer: int) -> Geometry:
        """Who sees what in a layer: a block's last `queries` slots of `slots` over the pairs before its anchor, and causally over its own slots."""
        window = self.config.sliding_window if self.config.layer_types[layer] == SLIDING else None
        return Geometry(batch.document, batch.position, anchors, slots, window, True, queries, skip=1)


def attends(drafter: EagleDrafter, batch: Batch, anchors: Tensor, slots: int, queries: int, attention: Path) -> list[Attend]:
    """One attention a layer for these anchors; layers with the same window share it."""
    made: dict[str, Attend] = {}
    for i, kind in enumerate(drafter.config.layer_types):
        if kind not in made:
            made[kind] = make_attend(attention, drafter.geometry(batch, anchors, slots, queries, i))
    return [made[kind] for kind in drafter.config.layer_types]


def check_eagle(config: DraftConfig) -> None:
    """Refuse what these algorithms do not have.

    Raises:
        CheckpointError: names the field.
    """
    style = config.extra.get("layer_style")
    if style not in LAYER_STYLES:
        raise CheckpointError(f"layer_style {style!r} is not known; known are {', '.join(LAYER_STYLES)}", mend="set drafter.eagle.layer_style")
    missing = [name for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if not isinstance(config.extra.get(name), bool)]
    if missing:
        raise CheckpointError(f"an {config.algorithm} drafter's {missing[0]} must be true or false, not {config.extra.get(missing[0])!r}")
    if config.extra["norm_before_fc"] and config.extra["fc_norm"]:
        raise CheckpointError(
            "norm_before_fc and fc_norm are both true, but the captured states are normalised together or one by one", mend="set one to false"
        )
    check_layers(config)
    if config.markov_rank or config.confidence_head or not config.sample_from_anchor:
        raise CheckpointError(f"an {config.algorithm} drafter has no heads and drafts from the anchor on")
