"""SharedTables: the target's frozen tensors that a drafter trains against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.batches.vocab import DraftVocab
from firesteel.losses.types import Head
from firesteel.target.head import TargetHead


@dataclass
class SharedTables:
    """Frozen tensors.

    Attributes:
        embed: `[V, d]` the target's input embedding.
        head: `[V_d, d]` rows of the target's LM head that the drafter uses.
        teacher_weight: `[V_d, d]` rows that give the target's logits (the same tensor).
        target: final norm, scale and soft-cap of the target.
    """

    embed: Tensor
    head: Tensor
    teacher_weight: Tensor
    teacher_head: Head
    draft_head: Head
    target: TargetHead

    def teacher_states(self, last: Tensor) -> Tensor:
        """`[U, d]` states before the final norm -> what the LM head multiplies."""
        return self.target.states(last.to(self.target.weight.dtype)).to(self.head.dtype)


def make_tables(target: TargetHead, vocab: DraftVocab | None) -> SharedTables:
    """Cut the target's head to the draft vocabulary; the drafter's own logits are neither scaled nor capped, as vLLM serves them.

    The head of a half-precision target is widened on a CPU, where a product would come out rounded, and a softmax of rounded logits is another one;
    a float16 one everywhere, whose range is too small for gradients.
    """
    head = target.weight if vocab is None else target.weight[vocab.target_ids.to(target.weight.device)].contiguous()
    if head.dtype == torch.float16 or (head.dtype == torch.bfloat16 and head.device.type == "cpu"):
        head = head.float()
    return SharedTables(target.embed, head, head, Head(target.scale, target.softcap), Head(), target)
