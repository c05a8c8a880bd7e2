"""TokenPicker: from the hidden states of a block to its tokens, left to right with the Markov head.

Each token's logits need `W2 r_k` over the whole vocabulary, and r_k needs the token before: done naively that reads the table
W2 once per token, several times the cost of everything else in a draft. Both ways here give the naive result with less reading:

greedy   With |W2[v] . r| <= |W2[v]| |r| only tokens with U_k(v) + |W2[v]| |r| at least the score of some token can win: those rows
         of W2 are read, and no others.
sampled  The random numbers are drawn beforehand (Gumbel: argmax of logits / T + noise is a draw from the softmax), which makes the
         block a fixed function of its predecessors. It is solved by fixed-point iteration from a guess: every pass computes all
         open slots in one product, and finally settles at least one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from firesteel.drafters.heads import ConfidenceHead, MarkovHead
from firesteel.kernels.packed import PackedLinear

# Above V / _MANY candidates, gathering their rows costs more than reading all of W2 in order.
_MANY = 8
# Slack of the bound against rounding, in units of the dtype's epsilon.
_SLACK = 64


@dataclass
class Picked:
    """`tokens`: n target ids; `probs`: `[n, V_d]` or None when greedy; `confidences`: n calibrated probabilities or None."""

    tokens: list[int]
    probs: Tensor | None
    confidences: list[float] | None


class Picker(Protocol):
    """Turns a block's states into tokens."""

    def pick(self, z: Tensor, anchor: int, temperature: float, generator: torch.Generator | None) -> Picked:
        """`z [n, h]` of the n first predicting slots -> n tokens after `anchor` (a target id)."""
        ...


class TokenPicker:
    """The heads of one drafter, ready for decoding; inference only.

    Args:
        head: packed rows of the target's LM head, `h -> V_d`.
        markov, confidence: the drafter's heads, or None.
        draft_to_target: `[V_d]` int64 or None.
        temperatures: one per drafted position, for the confidences.
    """

    def __init__(
        self,
        head: PackedLinear,
        markov: MarkovHead | None,
        confidence: ConfidenceHead | None,
        draft_to_target: Tensor | None,
        temperatures: Sequence[float] | None,
    ) -> None:
        self.head, self.markov, self.confidence, self.draft_to_target = head, markov, confidence, draft_to_target
        self.temperatures = temperatures
        self.w2: PackedLinear | None = None
        if markov is not None:
            self.table = markov.markov_w2.weight.detach()
            self.slack = _SLACK * torch.finfo(self.table.dtype).eps
            self.norms = self.table.norm(dim=1) * (1 + self.slack)

    def pick(self, z: Tensor, anchor: int, temperature: float, generator: torch.Generator | None) -> Picked:
        """`z [n, h]` of the n first predicting slots -> n tokens after `anchor` (a target id)."""
        base = self.head(z)  # [n, V_d]
        if temperature > 0:
            tokens, probs = self._sample(base, z, anchor, temperature, generator)
        else:
            tokens, probs = self._greedy(base, z, anchor), None
        return Picked(tokens, probs, self._confidences(z, anchor, tokens))

    def _greedy(self, base: Tensor, z: Tensor, anchor: int) -> list[int]:
        if self.markov is None:
            return self._to_target(base.argmax(dim=-1)).tolist()
        tokens, state, previous = [], None, anchor
        for k in range(z.shape[0]):
            row, state = self.markov.step(z[k : k + 1], self.markov.markov_w1.weight[previous : previous + 1], state)
            token = self._best(base[k], row[0])
            previous = int(token if self.draft_to_target is None else self.draft_to_target[token])
            tokens.append(previous)
        return tokens

    def _best(self, base: Tensor, row: Tensor) -> int:
        """argmax over v of `base[v] + W2[v] . row`."""
        upper = torch.add(base, self.norms * row.norm())
        guess = int(upper.argmax())
        floor = base[guess] + self.table[guess] @ row
        candidates = (upper >= floor - self.slack * (floor.abs() + base[guess].abs())).nonzero()[:, 0]
        if not 0 < candidates.shape[0] * _MANY <= base.shape[0]:  # many; or none, where something is not a number
            return int(torch.addmv(base, self.table, row).argmax())
        scores = torch.addmv(base[candidates], self.table[candidates], row)
        return int(candidates[scores.argmax()])

    def _sample(self, base: Tensor, z: Tensor, anchor: int, temperature: float, generator: torch.Generator | None) -> tuple[list[int], Tensor]:
        base = base if base.dtype == torch.float64 else base.float()
        # argmax(logits / T - log E) with E exponential is a draw from softmax(logits / T).
        noise = torch.empty_like(base).exponential_(generator=generator).log_().neg_()
        if self.markov is None:
            logits = base / temperature
            return self._to_target((logits + noise).argmax(dim=-1)).tolist(), logits.softmax(dim=-1)
        if self.w2 is None:  # a second copy of the table, only where sampling is used
            self.w2 = PackedLinear(self.table)
        n = z.shape[0]
        logits = torch.empty_like(base)
        tokens = self._to_target((base / temperature + noise).argmax(dim=-1))
        settled = 0  # tokens before this slot, and so its logits when next computed, are final
        while settled < n:
            e = self.markov.embed(torch.cat([tokens.new_tensor([anchor]), tokens[:-1]]))
            rows = self.markov.rows(z[None], e[None], first=0)[0, settled:]
            logits[settled:] = self.w2.plus(rows, base[settled:]) / temperature
            found = self._to_target((logits[settled:] + noise[settled:]).argmax(dim=-1))
            wrong = (found != tokens[settled:]).nonzero()
            tokens = torch.cat([tokens[:settled], found])
            # Slots up to and with the first that changed had the right predecessors; the one after it has not yet.
            settled = n if wrong.shape[0] == 0 else settled + int(wrong[0, 0]) + 1
        return tokens.tolist(), logits.softmax(dim=-1)

    def _confidences(self, z: Tensor, anchor: int, tokens: list[int]) -> list[float] | None:
        if self.confidence is None:
            return None
        e = None
        if self.confidence.with_markov and self.markov is not None:
            e = self.markov.embed(torch.tensor([anchor, *tokens[:-1]], device=z.device))
        logits = self.confidence(z, e)
        if self.temperatures is not None:
            logits = logits / torch.tensor(self.temperatures[: len(tokens)], dtype=logits.dtype, device=logits.device)
        return logits.sigmoid().tolist()

    def _to_target(self, ids: Tensor) -> Tensor:
        return ids if self.draft_to_target is None else self.draft_to_target[ids]
