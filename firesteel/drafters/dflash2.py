"""DFlash2 (Z Lab, 2026): the DFlash backbone with short convolutions inside each block, and a selector among each slot's likeliest tokens.

A DFlash block drafts all its slots at once, so that a slot does not know what the slot before it says. DFlash2 tells it twice:
    convolution  around attention and MLP of every layer, inside the block only, taps t and groups of channels:
                 out[i, c] = sum_t (base[t, c] + delta[i, t, group(c)]) * x[i - t, c]
                 `delta` is linear in the sublayer's normed input; one kernel acts on the sublayer's input, one on its output.
    selector     of the top_k tokens b with the largest logits U(b), given the token a before them:
                 S(a, b) = U(b) + <A[a] * (P z), B[b]>
Fresh convolutions are the identity and a fresh selector adds nothing, so that a DFlash with fresh tensors of both is that DFlash.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.batches.batch import Batch
from firesteel.drafters.attention import Attend, Path
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.dflash2_format import check_dflash2, own_settings
from firesteel.drafters.layers import DraftLayer, Table
from firesteel.drafters.rows import Reranked, TrainingRows
from firesteel.drafters.token_logits import token_logits
from firesteel.kernels.linear import linear


def convolve(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """The convolution above: `x [..., g, h]`, `base [K, h]`, `delta [..., g, K, G]` -> `[..., g, h]`; what lies before a block counts as zero."""
    taps, groups = delta.shape[-2:]
    parts, fixed = x.unflatten(-1, (groups, -1)), base.unflatten(-1, (groups, -1))  # [..., g, G, c], [K, G, c]
    out = parts * (fixed[0] + delta[..., 0, :, None])
    for t in range(1, min(taps, x.shape[-2])):
        out[..., t:, :, :] += parts[..., :-t, :, :] * (fixed[t] + delta[..., t:, t, :, None])
    return out.flatten(-2)


class DynamicConv(nn.Module):
    """The two convolutions around a sublayer; freshly made, they do nothing.

    `base_kernel [2, K, h]` and `kernel_projection [2 * K * G, h]`: first the input's side, then the output's.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        own = own_settings(config)
        self.taps = own.kernel
        self.base_kernel = nn.Parameter(torch.empty(2, own.kernel, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * own.kernel * (config.hidden_size // own.group), bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """The identity."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1
        self.kernel_projection.weight.zero_()

    def before(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Normed input `[..., g, h]` of the sublayer -> what the sublayer reads, and the kernels `[..., g, K, G]` for `after`."""
        delta = linear(y, self.kernel_projection.weight).unflatten(-1, (2, self.taps, -1))
        return convolve(y, self.base_kernel[0], delta[..., 0, :, :]), delta[..., 1, :, :]

    def after(self, out: Tensor, delta: Tensor) -> Tensor:
        """Output `[..., g, h]` of the sublayer -> what is added to the residual stream."""
        return convolve(out, self.base_kernel[1], delta)


class ConvLayer(DraftLayer):
    """A draft layer with convolutions around attention and MLP; context features pass none."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.attention_conv, self.mlp_conv = DynamicConv(config), DynamicConv(config)

    def forward(self, x: Tensor, context: Tensor, block_table: Table, context_table: Table, attend: Attend) -> Tensor:
        """As `DraftLayer.forward`."""
        y, kernel = self.attention_conv.before(self.input_layernorm(x))
        attention = self.self_attn
        mixed = attend(attention.queries(y, block_table), attention.keys_values(context, context_table), attention.keys_values(y, block_table))
        x = x + self.attention_conv.after(attention.out(mixed), kernel)
        y, kernel = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(y), kernel)


class CandidateSelector(nn.Module):
    """Codebooks A, B `[V, r]` and projection P `[r, h]` of the selector.

    B starts at zero, so that a fresh selector chooses what the logits choose; A and P get a gradient as soon as B has moved.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        own = own_settings(config)
        self.top_k = own.top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, own.rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, own.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, own.rank, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        nn.init.normal_(self.predecessor_codebook, std=0.02)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)
        self.successor_codebook.zero_()

    def bonus(self, z: Tensor, previous: Tensor, tokens: Tensor) -> Tensor:
        """`<A[a] * (P z), B[b]>` for states `[R, h]`, predecessors a `[R]` and tokens b `[R, n]`: `[R, n]`."""
        query = F.embedding(previous, self.predecessor_codebook) * linear(z, self.hidden_projection.weight)
        return (F.embedding(tokens, self.successor_codebook) @ query[..., None])[..., 0]


class DFlash2Drafter(BlockDrafter):
    """DFlash with convolutions and a candidate selector.

    Raises:
        RecipeError, CheckpointError: the config asks for what does not exist.
    """

    layer_class = ConvLayer

    def __init__(self, config: DraftConfig) -> None:
        check_dflash2(config)
        super().__init__(config)
        for layer in self.layers:
            assert isinstance(layer, ConvLayer)
            layer.attention_conv.reset()  # the backbone's start has drawn them at random
            layer.mlp_conv.reset()
        self.candidate_selector = CandidateSelector(config)
        self.selector_loss = own_settings(config).selector_loss

    def training_rows(self, batch: Batch, embed: Tensor, head: Tensor, *, attention: Path = "auto") -> TrainingRows:
        """As `BlockDrafter.training_rows`, with the selector as second choice among the `top_k` likeliest tokens."""
        rows = super().training_rows(batch, embed, head, attention=attention)
        return replace(rows, candidates=self.candidate_selector.top_k, rerank=partial(self.rerank, batch, rows.z, head))

    def rerank(self, batch: Batch, z: Tensor, head: Tensor, candidates: Tensor, teacher: Tensor) -> Reranked:
        """What the selector makes of each slot's candidates, the token before them being the true one.

        The loss is cross entropy over the candidates. Where the true token is not among them it stands in for the last: the loss then has an
        answer, and nothing else sees that token.

        Args:
            z: `[N, g, h]` final hidden states.
            head: `[V, h]` the target's LM head, frozen.
            candidates: `[N, g, K]` ids by falling logit; of slots that predict nothing they do not matter.
            teacher: `[N, g, K]` the target's probabilities of them.
        """
        valid = batch.slots >= 0
        label = batch.draft_labels[valid]  # [R]
        tokens = torch.cat([candidates[valid], label[:, None]], dim=1)  # [R, K + 1], the true token last
        previous = batch.previous_tokens(self.config.sample_from_anchor)[valid]
        states = z[valid]
        scores = token_logits(states, head, tokens) + self.candidate_selector.bonus(states, previous, tokens)
        scores = scores.to(teacher.dtype)
        served, true = scores[:, :-1], scores[:, -1]
        hit = tokens[:, :-1] == label[:, None]
        last = torch.where(hit.any(dim=1), served[:, -1], true)
        loss = torch.cat([served[:, :-1], last[:, None]], dim=1).logsumexp(dim=1) - true
        with torch.no_grad():
            correct = hit.gather(1, served.argmax(dim=1, keepdim=True))[:, 0]
            accept = torch.minimum(served.softmax(dim=1), teacher[valid]).sum(dim=1)

        def slots(values: Tensor) -> Tensor:
            return values.new_zeros(valid.shape).masked_scatter(valid, values)

        return Reranked(slots(self.selector_loss * loss), slots(correct), slots(accept))
