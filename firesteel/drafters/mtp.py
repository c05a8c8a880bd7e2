"""Fine-tuning of a target's multi-token-prediction head (FastMTP, arXiv 2509.18362): one layer, applied step after step with shared weights.

Pair i joins the token x_i with the target's state before it: `fc([norm(embed(x_i)) ; norm(s_{i-1})])`, where s is the target's last state
*after* its final norm, which is what servers hand over. One decoder layer of the target's own class runs over the pairs; its output after
`mtp.norm` predicts x_{i+1}, and stands in for the target's state in the next step's pair. Embedding and LM head are the target's, frozen.

As a block: the anchor's pair is slot 0 and the pairs before it are the context. A later step sees these as step 1 made them, and the earlier
steps of its own chain, as in serving (FastMTP's and speculators' training lets it see the same step of the earlier positions instead).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.batches.batch import Batch
from firesteel.drafters.attention import Geometry, Path, make_attend
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.layers import RMSNorm
from firesteel.drafters.mtp_format import check_mtp
from firesteel.drafters.rows import TrainingRows
from firesteel.drafters.target_layer import TargetLayer, TargetRope, make_layer
from firesteel.kernels.linear import linear

_STD = 0.02


class MtpHead(nn.Module):
    """The trained tensors, by the names that they have in the target's files below `mtp.`; a fresh head, or one of a DraftConfig's own."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        layer, norm, self.norm_offset = make_layer(config.extra["layer"])
        make_norm: type = norm
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.pre_fc_norm_embedding = make_norm(h, eps)
        self.pre_fc_norm_hidden = make_norm(h, eps)
        self.layers = nn.ModuleList([layer])
        self.norm = make_norm(h, eps)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim < 2:
                    parameter.fill_(1.0 - self.norm_offset)
                else:
                    nn.init.normal_(parameter, std=_STD)


class MtpDrafter(nn.Module):
    """A drafter of chains; `config.block_size` is the number of steps, which is the number of drafted tokens.

    `target_norm` is the target's final norm. It is not trained, and travels in the checkpoint because captured states are those before it.

    Raises:
        CheckpointError: the config asks for what does not exist.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        check_mtp(config)
        self.config = config
        self.mtp = MtpHead(config)
        self.target_norm = RMSNorm(config.hidden_size, config.rms_norm_eps).requires_grad_(False)
        self.rope = TargetRope(config.extra["layer"])

    @property
    def fc(self) -> nn.Linear:
        """The projection of pairs."""
        return self.mtp.fc

    @property
    def norm(self) -> nn.Module:
        """The norm of what leaves the head."""
        return self.mtp.norm

    @property
    def layer(self) -> TargetLayer:
        """The decoder layer's computations."""
        return TargetLayer(self.mtp.layers[0], self.mtp.norm_offset)

    def training_rows(self, batch: Batch, embed: Tensor, head: Tensor, *, attention: Path = "auto") -> TrainingRows:
        """Forward pass over all blocks of a batch, each slot given the true tokens before it.

        Args:
            batch: T packed tokens, N blocks of g slots.
            embed: `[V, h]` the target's embedding.
            head: `[V, h]` the target's LM head.
            attention: implementation; all give the same up to rounding.
        """
        z = self.block_states(batch, embed, attention)
        return TrainingRows([(z.flatten(0, 1), head)], None, z)

    def block_states(self, batch: Batch, embed: Tensor, attention: Path) -> Tensor:
        """States `[N, g, h]` of all slots after the last norm, step by step."""
        dtype, layer = self.fc.weight.dtype, self.layer
        # Pair i of every packed token; first tokens get a wrong state, and nobody sees them (`skip`).
        pairs = self.join(self.embed(batch.token_ids, embed), self.features(batch.context).roll(1, dims=0))
        context = layer.keys_values(layer.enter(pairs), self.rope.table(batch.position, dtype))
        tokens, position = batch.previous_tokens(True), batch.position[batch.anchors]
        x = pairs[batch.anchors]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for step in range(batch.block_size):
            table, y = self.rope.table(position + step, dtype), layer.enter(x)
            k, v = layer.keys_values(y, table)
            keys.append(k)
            values.append(v)
            q, gate = layer.queries(y, table)
            geometry = Geometry(batch.document, batch.position, batch.anchors, step + 1, None, True, 1, skip=1)
            mixed = make_attend(attention, geometry)(q[:, None], context, (torch.stack(keys, 1), torch.stack(values, 1)))[:, 0]
            outputs.append(layer.norm(self.mtp.norm, layer.leave(x, mixed, gate)))
            if step + 1 < batch.block_size:
                x = self.join(self.embed(tokens[:, step + 1], embed), outputs[-1])
        return torch.stack(outputs, dim=1)

    def features(self, aux: Tensor) -> Tensor:
        """Captured states `[..., m * d]` -> the last of them after the target's final norm `[..., d]`."""
        return self.target_norm(aux[..., -self.config.hidden_size :].to(self.fc.weight.dtype))

    def join(self, embedding: Tensor, state: Tensor) -> Tensor:
        """Embedding and state `[..., h]` of pairs -> the layer's input `[..., h]`."""
        norm = self.layer.norm
        return linear(torch.cat([norm(self.mtp.pre_fc_norm_embedding, embedding), norm(self.mtp.pre_fc_norm_hidden, state)], dim=-1), self.fc.weight)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Token ids `[...]` -> `[..., h]` in the drafter's dtype."""
        return F.embedding(tokens, table).to(self.fc.weight.dtype)
