"""DFlash2Session: a DFlash2 drafter at work on one sequence, and the walk through its candidates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.dflash2 import CandidateSelector, ConvLayer, DFlash2Drafter, DynamicConv, convolve
from firesteel.drafters.layers import DraftLayer
from firesteel.drafters.pick import Picked, Picker
from firesteel.drafters.session import BlockSession, Mask, PackedLayer
from firesteel.kernels.packed import PackedLinear


class PackedConv:
    """`DynamicConv` with a packed projection."""

    def __init__(self, conv: DynamicConv) -> None:
        self.taps, self.base = conv.taps, conv.base_kernel.detach()
        self.projection = PackedLinear(conv.kernel_projection.weight)

    def before(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """As `DynamicConv.before`, `[g, h]`."""
        delta = self.projection(y).unflatten(-1, (2, self.taps, -1))
        return convolve(y, self.base[0], delta[:, 0]), delta[:, 1]

    def after(self, out: Tensor, delta: Tensor) -> Tensor:
        """As `DynamicConv.after`."""
        return convolve(out, self.base[1], delta)


class PackedConvLayer(PackedLayer):
    """Packed weights of a layer and of its convolutions."""

    def __init__(self, layer: ConvLayer, windowed: bool) -> None:
        super().__init__(layer, windowed)
        self.attention_conv, self.mlp_conv = PackedConv(layer.attention_conv), PackedConv(layer.mlp_conv)


class DFlash2Session(BlockSession):
    """Drafts for one sequence; see `BlockSession`."""

    def pack_layer(self, layer: DraftLayer, windowed: bool) -> PackedLayer:
        assert isinstance(layer, ConvLayer)
        return PackedConvLayer(layer, windowed)

    def make_picker(self, drafter: BlockDrafter, head: PackedLinear, temperatures: Sequence[float] | None) -> Picker:
        assert isinstance(drafter, DFlash2Drafter)
        return CandidatePicker(head, drafter.candidate_selector)

    def run_layer(self, i: int, layer: PackedLayer, x: Tensor, mask: Mask) -> Tensor:
        assert isinstance(layer, PackedConvLayer)
        y, kernel = layer.attention_conv.before(F.rms_norm(x, layer.input_norm.shape, layer.input_norm, self._eps))
        x = x + layer.attention_conv.after(layer.out(self.attend(i, layer, y, mask)), kernel)
        y, kernel = layer.mlp_conv.before(F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, self._eps))
        return x + layer.mlp_conv.after(layer.down(layer.up.times(y, layer.gate.silu(y))), kernel)


class CandidatePicker:
    """Walks left to right through each slot's `top_k` likeliest tokens, by `S(a, b) = U(b) + <A[a] * (P z), B[b]>`.

    The predecessor of a slot is one of the `top_k` candidates of the slot before, so all scores of a block, `[n, K, K]`, are a few small
    products; the walk itself only looks up what each slot chooses after each predecessor. At temperature T a slot's distribution is
    softmax(S / T) over its candidates and zero elsewhere. That is what is drawn from and what is returned: verification stays lossless.

    Args:
        head: packed LM head of the target, `h -> V`.
    """

    def __init__(self, head: PackedLinear, selector: CandidateSelector) -> None:
        self.head, self.top_k = head, selector.top_k
        self.predecessors, self.successors = selector.predecessor_codebook.detach(), selector.successor_codebook.detach()
        self.projection: nn.Module = PackedLinear(selector.hidden_projection.weight)

    def pick(self, z: Tensor, anchor: int, temperature: float, generator: torch.Generator | None) -> Picked:
        """`z [n, h]` of the n first predicting slots -> n tokens after `anchor`."""
        logits = self.head(z)  # [n, V]
        unary, tokens = logits.topk(self.top_k, dim=-1)  # [n, K]
        scores = self.scores(z, anchor, unary, tokens)
        if temperature > 0:
            probs = (scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature).softmax(dim=-1)
            path = _walk(draw(probs, generator))
            steps = torch.arange(len(path), device=z.device)
            taken = probs[steps, torch.tensor([0, *path[:-1]], device=z.device)]  # [n, K], each slot's row of the predecessor that was chosen
            spread = taken.new_zeros(logits.shape).scatter_(1, tokens, taken)
        else:
            path, spread = _walk(scores.argmax(dim=-1).tolist()), None
        ids: list[list[int]] = tokens.tolist()
        return Picked([row[place] for row, place in zip(ids, path, strict=True)], spread, None)

    def scores(self, z: Tensor, anchor: int, unary: Tensor, tokens: Tensor) -> Tensor:
        """`[n, K, K]`: S of slot, candidate of the slot before, own candidate. The first slot has one predecessor, the anchor, in all its rows."""
        first = tokens.new_full((1, self.top_k), anchor)
        previous = torch.cat([first, tokens[:-1]])
        query = F.embedding(previous, self.predecessors) * self.projection(z)[:, None]  # [n, K, r]
        return torch.baddbmm(unary[:, None], query, F.embedding(tokens, self.successors).transpose(1, 2))


def draw(probs: Tensor, generator: torch.Generator | None) -> Sequence[Sequence[int]]:
    """One draw from each row of `[n, K, K]`. The rows of a slot share their random numbers: the walk uses one of them only.

    By an exponential race: argmax of p / E with E exponential is a draw from p, and never a token of probability zero.
    """
    race = probs.new_empty(probs.shape[0], 1, probs.shape[2]).exponential_(generator=generator)
    drawn: list[list[int]] = (probs / race.clamp_(min=torch.finfo(probs.dtype).tiny)).argmax(dim=-1).tolist()
    return drawn


def _walk(choices: Sequence[Sequence[int]]) -> list[int]:
    """`choices[k][i]` is the candidate that slot k takes after candidate i of the slot before -> the candidate taken in each slot."""
    path, place = [], 0
    for slot in choices:
        place = slot[place]
        path.append(place)
    return path
