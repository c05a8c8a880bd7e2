"""From the recipe's wishes and the target's facts to a DraftConfig."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from firesteel import recipe as recipes
from firesteel.drafters.config import FULL, SLIDING, DraftConfig
from firesteel.drafters.heads import MARKOV_KINDS
from firesteel.drafters.latent_format import latent_rope
from firesteel.drafters.registry import DraftSpec, get_spec
from firesteel.drafters.rope import ROPE_KINDS, rope_kind
from firesteel.errors import RecipeError

# Of a target's RoPE these concern parts of heads or pictures, which a drafter does not have.
_FOREIGN_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter must know of its target; `vocab_size` counts the rows of the LM head."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    hidden_act: str
    num_layers: int


def draft_vocab_size(settings: recipes.Drafter, vocab_size: int, source: DraftConfig | None = None) -> int:
    """How many tokens a drafter of these settings can propose, of a target with `vocab_size`.

    What `drafter.draft_vocab_size` leaves open is as in the checkpoint to start from (`source`); without one it is the algorithm's own
    default where the target has more tokens, and else the target's whole vocabulary.
    """
    spec = get_spec(settings.algorithm)
    if settings.draft_vocab_size is not None:
        return settings.draft_vocab_size
    if source is not None:  # that of another target's drafter is none of this one's; `warm_config` refuses it
        return source.draft_vocab_size if spec.reduced_vocab and source.vocab_size == vocab_size else vocab_size
    return min(vocab_size, _or(spec.default_draft_vocab, vocab_size))


def make_config(
    settings: recipes.Drafter, facts: TargetFacts, layer_ids: Sequence[int], mask_token_id: int | None, source: DraftConfig | None = None
) -> DraftConfig:
    """The drafter that a recipe asks for. Sizes left empty are the target's; of the draft vocabulary see `draft_vocab_size`.

    The MLP is SwiGLU whatever the target's activation, since that is what servers run for these drafters. RoPE is the target's
    where its kind does not change with the length of the text; otherwise the drafter has plain RoPE of the target's theta (the
    config carries it, so that training and serving agree). An algorithm without heads or with one backbone ignores their settings.

    Args:
        source: the checkpoint that the drafter starts from, if any; what else it decides `warm_config` puts in.

    Raises:
        RecipeError: unknown names, layers that the target does not have, settings that contradict each other.
    """
    spec = get_spec(settings.algorithm)
    _check(settings, facts, layer_ids, spec)
    rank = settings.markov_rank if spec.heads else 0
    confidence = settings.confidence_head and spec.heads
    extra, num_heads, rope_scaling = spec.options(settings), _or(settings.num_heads, facts.num_heads), _rope_scaling(facts.rope_scaling)
    latent = extra.get("backbone") == "mla"
    if latent:
        _check_latent(settings)
    return DraftConfig(
        algorithm=settings.algorithm,
        hidden_size=facts.hidden_size,
        intermediate_size=_or(settings.intermediate_size, facts.intermediate_size),
        num_layers=settings.num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if latent else _or(settings.num_kv_heads, facts.num_kv_heads),
        head_dim=settings.mla.qk_rope_head_dim if latent else _or(settings.head_dim, facts.head_dim),
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size(settings, facts.vocab_size, source),
        target_hidden_size=facts.hidden_size,
        layer_ids=tuple(layer_ids),
        block_size=settings.block_size,
        mask_token_id=mask_token_id if spec.masks else None,
        sample_from_anchor=spec.sample_from_anchor if settings.sample_from_anchor is None else settings.sample_from_anchor,
        layer_types=layer_types(settings.attention, settings.num_layers),
        sliding_window=settings.sliding_window,
        causal=settings.causal if spec.causal is None else spec.causal,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
        rope_scaling=latent_rope(rope_scaling) if latent else rope_scaling,
        max_position_embeddings=facts.max_position_embeddings,
        hidden_act="silu",
        markov_rank=rank,
        markov_head=settings.markov_head if rank else "vanilla",
        confidence_head=confidence,
        confidence_with_markov=settings.confidence_with_markov and confidence and rank > 0,
        extra=extra,
    )


def layer_types(attention: str, num_layers: int) -> tuple[str, ...]:
    """`full`, `sliding` or `mixed` (the last layer full, the others sliding) as one type per layer."""
    if attention == "full":
        return (FULL,) * num_layers
    return (SLIDING,) * (num_layers - 1) + (FULL if attention == "mixed" else SLIDING,)


def _check(settings: recipes.Drafter, facts: TargetFacts, layer_ids: Sequence[int], spec: DraftSpec) -> None:
    heads = spec.heads
    bad = [i for i in layer_ids if not 0 <= i <= facts.num_layers]
    if bad:
        raise RecipeError(
            f"target.layer_ids has {bad[0]}, but the target has {facts.num_layers} layers",
            mend=f"ids go from 0 (embeddings) to {facts.num_layers} (after the last layer)",
        )
    if settings.sample_from_anchor not in (None, spec.sample_from_anchor) and not spec.anchor_choice:
        raise RecipeError(
            f"drafter.sample_from_anchor={str(settings.sample_from_anchor).lower()} contradicts drafter.algorithm={spec.name}",
            mend="leave out drafter.sample_from_anchor",
        )
    if settings.draft_vocab_size not in (None, facts.vocab_size) and not spec.reduced_vocab:
        raise RecipeError(
            f"drafter.draft_vocab_size={settings.draft_vocab_size}, but drafter.algorithm={spec.name} has the target's whole vocabulary",
            mend="leave out drafter.draft_vocab_size",
        )
    if settings.attention == "mixed" and settings.num_layers < 2:
        raise RecipeError("drafter.attention=mixed needs two layers", mend="set drafter.num_layers=2, or drafter.attention to full or sliding")
    if settings.attention != "full" and settings.block_size > settings.sliding_window:
        raise RecipeError(
            f"drafter.sliding_window={settings.sliding_window} is shorter than drafter.block_size={settings.block_size}",
            mend="set drafter.sliding_window higher",
        )
    if heads and settings.markov_head not in MARKOV_KINDS:
        raise RecipeError(f"drafter.markov_head={settings.markov_head} is not known", mend=f"one of {', '.join(MARKOV_KINDS)}")
    if heads and settings.markov_rank == 0 and settings.markov_head != "vanilla":
        raise RecipeError(
            f"drafter.markov_head={settings.markov_head} contradicts drafter.markov_rank=0 (no Markov head)",
            mend="set drafter.markov_rank higher, or leave out drafter.markov_head",
        )
    if settings.init == "target" and facts.hidden_act not in ("silu", "swish"):
        raise RecipeError(f"drafter.init=target: the target's MLP uses {facts.hidden_act}, a drafter's is SwiGLU", mend="set drafter.init=random")


def _check_latent(settings: recipes.Drafter) -> None:
    for name, value, mend in (
        ("num_kv_heads", settings.num_kv_heads, "leave it out: all heads share one latent"),
        ("head_dim", settings.head_dim, "leave it out, and set drafter.mla.qk_nope_head_dim, qk_rope_head_dim and v_head_dim"),
    ):
        if value is not None:
            raise RecipeError(f"drafter.{name}={value} has no meaning with drafter.backbone=mla", mend=mend)
    if settings.init == "target":
        raise RecipeError("drafter.init=target: no target's layers fit drafter.backbone=mla", mend="set drafter.init=random")


def _rope_scaling(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = rope_kind(scaling)
    if scaling is None or kind == "default" or kind not in ROPE_KINDS:
        return None
    return {"rope_type": kind, **{k: v for k, v in scaling.items() if k not in ("type", "rope_type", *_FOREIGN_ROPE)}}


def _or(wish: int | None, otherwise: int) -> int:
    return otherwise if wish is None else wish
