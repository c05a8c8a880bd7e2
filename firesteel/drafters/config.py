"""DraftConfig: everything that fixes a block drafter's shape and its train/serve contract."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from firesteel.errors import CheckpointError, RecipeError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DraftConfig:
    """Shape and contract of a drafter; the same object trains, exports and decodes.

    `hidden_size` equals `target_hidden_size` wherever the target's embedding and LM head are shared.
    `layer_ids` follow Transformers' `hidden_states` (0 = embeddings). `vocab_size` counts the rows of the target's LM head;
    `draft_vocab_size` is smaller only with a reduced vocabulary. `mask_token_id` is None for algorithms without masks.
    `extra` holds what one algorithm alone has (values that JSON can hold).
    """

    algorithm: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int | None
    sample_from_anchor: bool
    layer_types: tuple[str, ...]
    sliding_window: int = 2048
    causal: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 8192
    hidden_act: str = "silu"
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise RecipeError(
                f"drafter.num_heads={self.num_heads} is not a multiple of drafter.num_kv_heads={self.num_kv_heads}",
                mend="set drafter.num_kv_heads to a divisor",
            )
        if len(self.layer_types) != self.num_layers:
            raise CheckpointError(f"{len(self.layer_types)} layer types for {self.num_layers} layers")
        if not self.layer_ids:
            raise RecipeError("a drafter needs at least one captured layer", mend="set target.layer_ids")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise RecipeError(f"drafter.mask_token_id={self.mask_token_id} is outside the target's vocabulary of {self.vocab_size}")
        if self.draft_vocab_size > self.vocab_size:
            raise RecipeError(f"drafter.draft_vocab_size={self.draft_vocab_size} exceeds the target's vocabulary of {self.vocab_size}")

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    @property
    def num_drafts(self) -> int:
        """Tokens drafted per block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
