"""The heads of DSpark (arXiv 2607.05147): a Markov head that lets a slot see its predecessor, and a confidence head.

Token k's logits are `U_k + W2 r_k` with `U_k = W_lm z_k` and a row r_k of width r that depends on the kind of head, with `e = W1[x_{k-1}]`:
    vanilla  r_k = e
    gated    r_k = sigma(G [z_k ; e] + b) * e
    rnn      gate, candidate, output = J [s_{k-1} ; e ; z_k] + b
             s_k = sigma(gate) * s_{k-1} + (1 - sigma(gate)) * tanh(candidate),   r_k = tanh(output),   s_0 = 0
W1 takes target ids, W2 gives draft ids. Only rows are made here: whoever multiplies by W2 does so together with the LM head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.drafters.config import DraftConfig
from firesteel.errors import RecipeError
from firesteel.kernels.linear import linear

MARKOV_KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """W1 `[V, r]`, W2 `[V_d, r]` and what the kind adds."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        if config.markov_head not in MARKOV_KINDS:
            raise RecipeError(f"drafter.markov_head={config.markov_head} is not known", mend=f"one of {', '.join(MARKOV_KINDS)}")
        rank, self.kind = config.markov_rank, config.markov_head
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def embed(self, previous: Tensor) -> Tensor:
        """Target ids `[...]` -> `[..., r]`."""
        return self.markov_w1(previous)

    def rows(self, z: Tensor, e: Tensor, *, first: int) -> Tensor:
        """All slots of blocks, predecessors given: `z [N, n, h]`, `e [N, n, r]` -> `[N, n, r]`.

        Slots before `first`, the first that predicts, get a row too (zero for rnn, whose state starts at `first`); nothing may use it.
        """
        if self.kind != "rnn":
            return self.step(z, e, None)[0]
        made, state = [torch.zeros_like(e[:, 0])] * first, None
        for k in range(first, z.shape[1]):
            row, state = self.step(z[:, k], e[:, k], state)
            made.append(row)
        return torch.stack(made, dim=1)

    def step(self, z: Tensor, e: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot: `z [..., h]`, `e [..., r]`, state of the slot before (None at the first) -> row `[..., r]` and state."""
        if self.kind == "vanilla":
            return e, None
        if self.kind == "gated":
            gate = linear(torch.cat([z, e], dim=-1), self.gate_proj.weight) + self.gate_proj.bias
            return gate.sigmoid() * e, None
        state = torch.zeros_like(e) if state is None else state
        joint = linear(torch.cat([state, e, z], dim=-1), self.joint_proj.weight) + self.joint_proj.bias
        raw, candidate, output = joint.chunk(3, dim=-1)
        gate = raw.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()


class ConfidenceHead(nn.Module):
    """Logit of "token k survives, given that its prefix did": `w . [z_k ; W1[x_{k-1}]] + b`, or `w . z_k + b`; in float32."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov and config.markov_rank > 0
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, z: Tensor, e: Tensor | None) -> Tensor:
        """`z [..., h]`, `e [..., r]` (only read with Markov) -> logits `[...]`."""
        weight, width = self.proj.weight[0], z.shape[-1]
        # Two matrix-vector products instead of a copy of both inputs side by side.
        logits = F.linear(z.to(weight.dtype), weight[None, :width], self.proj.bias)
        if self.with_markov:
            assert e is not None, "the caller embeds the predecessor"
            logits = logits + F.linear(e.to(weight.dtype), weight[None, width:])
        return logits[..., 0]
