"""EAGLE-3 (arXiv 2503.01840): a chain of drafts, each fed with the drafter's own state of the one before (training-time test).

Step 1 runs the anchor's pair. Step s > 1 pairs the next token with the layer's own output of step s - 1 in place of a target feature; it sees
the pairs before the anchor as step 1 made them, and the earlier steps of its own chain. In training the tokens are the true ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.batches.batch import Batch
from firesteel.drafters.attention import Path
from firesteel.drafters.eagle import EagleDrafter, EagleLayer, Streams, attends


class Eagle3Drafter(EagleDrafter):
    """A drafter of chains; `config.block_size` is the number of steps, which is the number of drafted tokens."""

    def block_states(self, batch: Batch, embed: Tensor, attention: Path) -> Tensor:
        """States `[N, g, h]` after the last norm, step by step."""
        dtype, steps = self.fc.weight.dtype, batch.block_size
        pairs = self.pairs(batch, embed)
        context = self.context(batch, pairs, self.rope.table(batch.position, dtype), attention)
        tokens = batch.previous_tokens(True)  # [N, g]
        position = batch.position[batch.anchors]
        x: Streams = (pairs[0][batch.anchors], pairs[1][batch.anchors])
        keys: list[list[Tensor]] = [[] for _ in self.layers]
        values: list[list[Tensor]] = [[] for _ in self.layers]
        outputs: list[Tensor] = []
        for step in range(steps):
            table = self.rope.table(position + step, dtype)
            stream: Tensor | Streams = x
            for i, (layer, attend) in enumerate(zip(self.layers, attends(self, batch, batch.anchors, step + 1, 1, attention), strict=True)):
                assert isinstance(layer, EagleLayer)
                y, residual = layer.enter(stream)
                k, v = layer.self_attn.keys_values(y, table)
                keys[i].append(k)
                values[i].append(v)
                mixed = attend(layer.self_attn.queries(y, table)[:, None], context[i], (torch.stack(keys[i], 1), torch.stack(values[i], 1)))
                stream = layer.leave(residual, mixed[:, 0])
            assert isinstance(stream, Tensor)
            outputs.append(self.norm(stream))
            if step + 1 < steps:
                x = (self.embed(tokens[:, step + 1], embed), outputs[-1] if self.config.extra["norm_output"] else stream)
        return torch.stack(outputs, dim=1)
