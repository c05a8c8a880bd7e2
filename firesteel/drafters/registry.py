"""The built-in algorithms. Others are added the same way, from outside: see `spec.register`."""

from __future__ import annotations

from firesteel.drafters import block_format as blocks
from firesteel.drafters import dflash2_format as two
from firesteel.drafters import dspark
from firesteel.drafters import eagle_format as eagles
from firesteel.drafters import latent_format as latents
from firesteel.drafters import mtp_format as mtps
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.dflash2 import DFlash2Drafter
from firesteel.drafters.dflash2_session import DFlash2Session
from firesteel.drafters.eagle3 import Eagle3Drafter
from firesteel.drafters.eagle_session import EagleSession
from firesteel.drafters.mtp import MtpDrafter
from firesteel.drafters.mtp_session import MtpSession
from firesteel.drafters.peagle import PEagleDrafter, PEagleSession
from firesteel.drafters.session import BlockSession
from firesteel.drafters.spec import DraftSpec, Native, get_spec, names, native_format, register

__all__ = ["DraftSpec", "Native", "get_spec", "names", "native_format", "register"]

register(
    DraftSpec(
        name="dspark",
        title="DSpark",
        architecture="DSparkDraftModel",
        build=dspark.build,
        session=dspark.open_session,
        keys=dspark.keys,
        schema=blocks.DSparkFields,
        to_json=blocks.dspark_to_json,
        from_json=blocks.dspark_from_json,
        options=dspark.options,
        check=dspark.check,
        anchor_choice=True,
        heads=True,
        method="dspark",
        limits=dspark.limits,
        unserved=dspark.unserved,
        second_runner=blocks.needs_second_runner,
        starts_from=("dflash",),
        native=Native(latents.MODEL_TYPE, latents.is_latent, latents.LatentFields, latents.latent_to_json, latents.latent_from_json),
        shares_context=True,
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
        unserved=blocks.block_unserved,
        second_runner=blocks.needs_second_runner,
        shares_context=True,
    )
)
register(
    DraftSpec(
        name="dflash2",
        title="DFlash2",
        architecture="DFlash2DraftModel",
        build=DFlash2Drafter,
        session=DFlash2Session,
        keys=two.dflash2_keys,
        schema=two.DFlash2Fields,
        to_json=two.dflash2_to_json,
        from_json=two.dflash2_from_json,
        options=two.dflash2_options,
        check=two.check_dflash2,
        sample_from_anchor=False,
        anchor_choice=True,
        reduced_vocab=False,
        method="dflash",  # vLLM tells DFlash2 by the architecture
        limits=two.dflash2_limits,
        unserved=blocks.block_unserved,
        second_runner=blocks.needs_second_runner,
        starts_from=("dflash",),
        shares_context=True,
    )
)
register(
    DraftSpec(
        name="eagle3",
        title="EAGLE-3",
        architecture="Eagle3DraftModel",
        build=Eagle3Drafter,
        session=EagleSession,
        keys=eagles.eagle_keys,
        schema=eagles.EagleFields,
        to_json=eagles.eagle_to_json,
        from_json=eagles.eagle_from_json,
        options=eagles.eagle3_options,
        causal=True,
        masks=False,
        default_draft_vocab=32_000,  # as the paper's checkpoints have
        method="eagle3",
    )
)
register(
    DraftSpec(
        name="peagle",
        title="P-EAGLE",
        architecture="PEagleDraftModel",
        build=PEagleDrafter,
        session=PEagleSession,
        keys=eagles.peagle_keys,
        schema=eagles.PEagleFields,
        to_json=eagles.peagle_to_json,
        from_json=eagles.peagle_from_json,
        options=eagles.peagle_options,
        causal=True,
        method="eagle3",
        # vLLM's V1 runner, the only one that has it, draws no drafts where another method than `standard` is asked for.
        serving={"parallel_drafting": True, "draft_sample_method": "probabilistic", "rejection_sample_method": "standard"},
        limits=eagles.peagle_limits,
        unserved=eagles.peagle_unserved,
    )
)
register(
    DraftSpec(
        name="mtp",
        title="MTP",
        architecture="MTPHead",
        build=MtpDrafter,
        session=MtpSession,
        keys=mtps.mtp_keys,
        schema=mtps.MtpFields,
        to_json=mtps.mtp_layer_json,
        from_json=mtps.mtp_from_frame,
        options=mtps.mtp_options,
        check=mtps.check_mtp,
        causal=True,
        masks=False,
        reduced_vocab=False,
        method="mtp",
        native=Native(mtps.MODEL_TYPE, lambda config: True, mtps.MtpFields, mtps.mtp_to_json, mtps.mtp_from_json),
        adapt=mtps.adapt_to_target,
        fits=mtps.fits_mtp,
        captures=mtps.last_layer,
        start=mtps.start_mtp,
        decay=mtps.mtp_decay,
        limits=mtps.mtp_limits,
        stitch=mtps.PREFIX,
    )
)
