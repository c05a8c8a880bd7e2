"""A target, with or without a packaged drafter, behind the batched engine."""

from __future__ import annotations

from pathlib import Path

from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import BatchTarget
from firesteel.decoding.batched.sessions import SessionDrafter, SessionTarget
from firesteel.decoding.policies import FixedLength, LengthPolicy, StaticThreshold
from firesteel.drafters.paged import PagedBlockDrafter, runs_paged
from firesteel.drafters.rows import BatchDrafter
from firesteel.errors import FiresteelError, RecipeError, TargetError
from firesteel.kernels.linear import has_fast_half
from firesteel.kernels.memory import holds_again
from firesteel.kernels.paged import BLOCK
from firesteel.stages.line import Line
from firesteel.stages.runtime import Parts, package_parts
from firesteel.stages.schedule import batch_scheduler
from firesteel.target.lean import UNFIT, lean_refusal
from firesteel.target.paged import PagedTarget, block_bytes
from firesteel.target.session import RECURRENT, TargetSession

_GIB = 2**30
_FLOAT = 4
_FEWEST = 8  # blocks


def open_engine(line: Line, package: Path | None, *, spare: int = 0) -> Engine:
    """The engine that `serve:` of the recipe describes.

    Args:
        package: an exported drafter; None decodes plainly.
        spare: steps of at most this many tokens leave a core to others (see `PagedTarget`).

    Raises:
        CheckpointError: the folder is damaged, or its drafter belongs to another target.
        RecipeError: settings that contradict each other or the drafter.
    """
    settings, spec = line.recipe.serve, line.target.spec
    parts = None if package is None else package_parts(line.target, package)
    length = min(settings.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    blocks = int(settings.cache_gb * _GIB / _block_bytes(line, parts))
    if blocks < _FEWEST:
        raise RecipeError(
            f"serve.cache_gb={settings.cache_gb:g} holds {blocks * BLOCK} positions of this target",
            mend=f"give {_FEWEST * _block_bytes(line, parts) / _GIB:.2g} or more",
        )
    # Longer sequences than the cache holds could never be run.
    length = min(length, blocks * BLOCK)
    target = _target(line, parts, length, blocks, spare)
    drafter = None if parts is None else _drafter(parts, target, length, blocks)
    pool = BlockPool(blocks, BLOCK, share=target.shares_prefix)
    tokens = 0 if parts is None else _draft_tokens(line, parts)
    engine = Engine(
        target,
        drafter,
        pool,
        draft_tokens=tokens,
        rejection=line.recipe.evaluate.rejection,
        max_requests=settings.max_requests,
        max_tokens=settings.step_tokens,
    )
    engine.policy = _policy(line, engine, parts)
    return engine


def _target(line: Line, parts: Parts | None, length: int, blocks: int, spare: int) -> BatchTarget:
    layer_ids = () if parts is None else parts.config.layer_ids
    model = line.target.model
    try:
        if lean_refusal(model, length) is None and not holds_again(model.parameters()):
            raise TargetError("this target cannot run batched: its packed weights would not fit into memory beside it")
        return PagedTarget(model, layer_ids, max_length=length, blocks=blocks, spare=spare)
    except UNFIT as e:
        line.screen.say(f"serve: requests take turns, a batch gains nothing ({e.message if isinstance(e, FiresteelError) else e})")
        first = TargetSession(model, layer_ids or line.layer_ids, max_length=length)
        if first.engine_name == RECURRENT and parts is not None:
            line.screen.say("serve: recurrent states are copied before every step; where drafts fall they are put back and accepted tokens read again")
        return SessionTarget(first.fork)


def _drafter(parts: Parts, target: BatchTarget, length: int, blocks: int) -> BatchDrafter:
    module = parts.drafter
    if isinstance(target, PagedTarget) and runs_paged(module):
        return PagedBlockDrafter(
            module,
            parts.embed,
            parts.head,
            draft_to_target=parts.target_ids,
            max_length=length,
            blocks=blocks,
            confidence_temperatures=parts.temperatures,
            half=has_fast_half(),
        )
    return SessionDrafter(parts.full_session(length).fork, parts.config.num_drafts)


def _draft_tokens(line: Line, parts: Parts) -> int:
    wanted, most = line.recipe.serve.tokens, parts.config.num_drafts
    if wanted is None:
        return most if parts.contract is None else min(most, parts.contract.speculative_tokens)
    if wanted > most:
        raise RecipeError(f"serve.tokens={wanted}, but the drafter drafts {most} a round", mend=f"set serve.tokens to at most {most}")
    return wanted


def _policy(line: Line, engine: Engine, parts: Parts | None) -> LengthPolicy:
    settings = line.recipe.serve
    if parts is None or settings.policy == "fixed":
        return FixedLength(engine.draft_tokens)
    if settings.policy == "threshold":
        if not parts.config.confidence_head:
            raise RecipeError(
                f"serve.policy=threshold needs a drafter with a confidence head, which this one ({parts.config.algorithm}) has not",
                mend="use another policy, or train with drafter.confidence_head=true",
            )
        return StaticThreshold(settings.threshold)
    return batch_scheduler(line, engine, parts, asynchronous=settings.policy == "asynchronous")


def _block_bytes(line: Line, parts: Parts | None) -> int:
    """What a block of positions takes in the caches of target and drafter."""
    drafter = 0 if parts is None else 2 * BLOCK * parts.config.num_layers * parts.config.num_kv_heads * parts.config.head_dim * _FLOAT
    return block_bytes(line.target.model) + drafter
