"""A first layer that starts by handing the newest captured state over, whole, to every slot of a block.

A block drafter sees the target's states through its attention alone, and what a target's copied attention fetches from the position before
the anchor is a fraction of what is there. An EAGLE drafter has that state in its residual stream and learns faster for it
(docs/learning-log.md). Here the first layer's heads begin as a copy machine:

- keys: one direction for context features, its opposite for the block's own slots (a linear rule that ridge regression finds), so queries,
  a constant direction of their own, see the context only;
- RoPE turns both by position. Amplitude and phase of each pair are chosen so that the logit falls with every step of distance, for every
  slot of a block: the nearest context position gets nearly all the weight;
- values and output: the feature itself, without its norm's weight, as large beside the block's embeddings as `_PART` of the target's own state.

It is a start and no constraint: everything is trained from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from firesteel.batches.batch import Batch
from firesteel.drafters.block import BlockDrafter, mask_token
from firesteel.drafters.layers import DraftLayer

# Logit between a query and the nearest key if all pairs agreed. 16 leaves half of the weight to others, 32 a tenth.
_SHARPNESS = 32.0
_REACH = 2048  # the furthest distance that counts
_FIT_STEPS = 600
_TOKENS = 8192
# Of the root mean square that the target's own states have there. A sixteenth and the whole do as well.
_PART = 0.25
_RIDGE = 1e-3
# Projections whose result is normalised do not care for their scale, but for how fast training turns them.
_STIFF = 10.0


class Nearest(NamedTuple):
    """A query and a key, each `[D]` and of length 1 before RoPE, and the weight `[g]` that each slot of a block then gives to the nearest position."""

    query: Tensor
    key: Tensor
    weight: Tensor


def nearest(inverse: Tensor, slots: int) -> Nearest:
    """Query and key whose logit is greatest at the nearest position, whichever slot of a block asks.

    The logit at distance d is `_SHARPNESS * sum_i a_i cos(f_i d + p_i)` with `a >= 0` that sum to 1; slot k sees distances from k + 1 on.
    `a` and `p` minimise the mean and the worst over the slots of the softmax's negative log weight at d = k + 1.

    Args:
        inverse: `[D/2]` float32, RoPE's radians per position.
        slots: g.
    """
    frequencies = inverse.detach().cpu().float()
    distance = torch.arange(1, _REACH + slots + 1, dtype=torch.float32)
    turns = distance[:, None] * frequencies
    with torch.enable_grad():
        amplitude, phase = torch.zeros_like(frequencies, requires_grad=True), torch.zeros_like(frequencies, requires_grad=True)
        optimizer = torch.optim.Adam([amplitude, phase], lr=0.05)
        for _ in range(_FIT_STEPS):
            logits = _SHARPNESS * (torch.cos(turns + phase) @ amplitude.softmax(0))
            beyond = torch.logcumsumexp(logits.flip(0), 0).flip(0)
            lost = (beyond - logits)[:slots]
            optimizer.zero_grad()
            (lost.mean() + 0.5 * lost.max()).backward()
            optimizer.step()
    size, phase = amplitude.detach().softmax(0).sqrt(), phase.detach()
    key = torch.cat([size, torch.zeros_like(size)])
    return Nearest(torch.cat([size * phase.cos(), size * phase.sin()]), key, (-lost).exp().detach())


@torch.no_grad()
def carry_state(drafter: BlockDrafter, samples: Sequence[Batch], embed: Tensor, *, feature: int) -> float:
    """Set the first layer of a drafter that has its other weights already; `fc` hands the captured state `feature` through.

    Args:
        samples: some batches; of them only tokens and captured states are read, to learn what features look like.
        embed: `[V, h]` the target's embedding.

    Returns:
        the share of positions that the keys take for what they are (context, anchor or mask).
    """
    config, layer = drafter.config, cast(DraftLayer, drafter.layers[0])
    attention, h, d = layer.self_attn, config.hidden_size, config.head_dim
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    room = max(_TOKENS, 2 * h)
    ends = accumulate(len(b.token_ids) for b in samples)
    some = [b for b, end in zip(samples, ends, strict=True) if end - len(b.token_ids) < room]  # held-out states may be gigabytes: no copy of all
    captured = torch.cat([b.context for b in some])[:room].to(device, dtype)
    tokens = torch.cat([b.token_ids for b in some])[:room].to(device)
    embedded, mask = F.embedding(tokens, embed).to(dtype), embed[mask_token(config)].to(device, dtype)
    context = torch.cat([drafter.hidden_norm(drafter.fc(part)) for part in captured.split(4096)])
    inside = layer.input_layernorm(torch.cat([embedded, mask.expand(max(1, len(tokens) // 4), h)]))
    both = torch.cat([context, inside])
    side = torch.cat([context.new_ones(len(context)), -context.new_ones(len(inside))])
    key_rule, query_rule = _ridge(both, side), _ridge(inside, inside.new_ones(len(inside)))

    found = nearest(drafter.rope.inverse, config.block_size)
    query, key = found.query.to(device, dtype), found.key.to(device, dtype)
    # After its norm a vector of width D has length sqrt(D) times the weight; logits are divided by sqrt(D).
    weight = (_SHARPNESS / d**0.5) ** 0.5 / drafter.rope.scale
    attention.q_norm.weight.fill_(weight)
    attention.k_norm.weight.fill_(weight)

    small = 0.1 * drafter.hidden_norm.weight.abs().median()
    norm = torch.where(drafter.hidden_norm.weight.abs() < small, small, drafter.hidden_norm.weight)
    size = captured.unflatten(-1, (len(config.layer_ids), -1))[:, feature].float().pow(2).mean(-1).sqrt().median()
    basis = _directions(context / norm, min(h, attention.kv_heads * d)) if attention.kv_heads * d < h else torch.eye(h, device=device, dtype=dtype)
    group = attention.heads // attention.kv_heads
    for number, part in enumerate(basis.split(d, dim=1)):
        keys, asking = slice(number * d, (number + 1) * d), slice(number * group * d, (number * group + 1) * d)
        attention.k_proj.weight[keys] = _STIFF * torch.outer(key, key_rule)
        attention.v_proj.weight[keys] = 0
        attention.v_proj.weight[number * d : number * d + part.shape[1]] = part.T / norm
        attention.o_proj.weight[:, number * group * d : (number + 1) * group * d] = 0  # the group's other heads fetch nothing yet
        attention.q_proj.weight[asking] = _STIFF * torch.outer(query, query_rule)
        attention.o_proj.weight[:, number * group * d : number * group * d + part.shape[1]] = _PART * size * part
    return float(((both @ key_rule) * side > 0).float().mean())


def _ridge(x: Tensor, wanted: Tensor) -> Tensor:
    """`w [h]` that minimises `|x w - wanted|^2` with a little shrinkage."""
    x, wanted = x.float(), wanted.float()
    gram = x.T @ x / len(x)
    damped = gram + _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=x.device)
    return torch.linalg.solve(damped, x.T @ wanted / len(x))


def _directions(states: Tensor, count: int) -> Tensor:
    """`[h, count]` orthonormal: where states `[T, h]` have most of their square."""
    states = states.float()
    return torch.linalg.eigh(states.T @ states / len(states)).eigenvectors.flip(1)[:, :count]
