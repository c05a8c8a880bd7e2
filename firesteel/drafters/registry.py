"""The built-in algorithms. Others are added the same way, from outside: see `spec.register`."""

from __future__ import annotations

from firesteel.drafters import block_format as blocks
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.session import BlockSession
from firesteel.drafters.spec import DraftSpec, get_spec, names, register

__all__ = ["DraftSpec", "get_spec", "names", "register"]

register(
    DraftSpec(
        name="dspark",
        title="DSpark",
        architecture="DSparkDraftModel",
        build=BlockDrafter,
        session=BlockSession,
        keys=blocks.block_keys,
        schema=blocks.DSparkFields,
        to_json=blocks.dspark_to_json,
        from_json=blocks.dspark_from_json,
        check=blocks.check_heads,
        anchor_choice=True,
        heads=True,
        method="dspark",
        limits=blocks.block_limits,
    )
)
register(
    DraftSpec(
        name="dflash",
        title="DFlash",
        architecture="DFlashDraftModel",
        build=BlockDrafter,
        session=BlockSession,
        keys=blocks.block_keys,
        schema=blocks.BlockFields,
        to_json=blocks.block_to_json,
        from_json=blocks.block_from_json,
        check=blocks.check_headless,
        sample_from_anchor=False,
        anchor_choice=True,
        method="dflash",
        limits=blocks.block_limits,
    )
)
