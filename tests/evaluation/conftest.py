"""Reports of a synthetic run, one with everything measured, one with the least."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from synthetic_run import make_requests, make_run, make_speeds, make_training

from firesteel.evaluation.calibration import calibration_arrays, fit_temperatures, measure_calibration
from firesteel.evaluation.report import build_report
from firesteel.evaluation.schema import Agreement, Cost


@pytest.fixture(scope="session")
def full_report() -> dict[str, Any]:
    """Everything measured."""
    requests = make_requests(1, prompts=6, drafters={"dspark": (0.0, 8), "dflash": (-0.1, 7)}, temperatures=[0.0, 1.0])
    held_out = make_requests(2, prompts=2, drafters={"dspark": (0.0, 8)}, temperatures=[0.0])
    fitted = calibration_arrays(make_requests(7, prompts=4, drafters={"dspark": (0.0, 8)}, temperatures=[0.0]))
    rng = np.random.default_rng(3)
    logits, survived, mask = calibration_arrays(held_out)
    return build_report(
        run=make_run(),
        requests=requests,
        speeds=make_speeds(4, lengths={"dspark": [2, 3, 4, 6, 8], "dflash": [2, 4, 7]}),
        draft_lengths={"dspark": 4, "dflash": 4},
        agreement=Agreement(compared=90, differing=1),
        costs=[Cost(length=n, verify_ms=23.5 + 2.1 * n, draft_ms=None if n == 0 else 5.2) for n in range(9)],
        calibration=measure_calibration(
            logits, survived, mask, temperatures=fit_temperatures(*fitted, bins=15), bins=15, measured_on="18 held-out answers that took no part in the fit"
        ),
        bins=15,
        thresholds=[i / 10 for i in range(10)],
        extra={"my-support-tickets": make_requests(5, prompts=1, drafters={"dspark": (-0.05, 8), "dflash": (-0.12, 7)}, temperatures=[0.0])},
        training={"dspark": make_training(rng, 1.3), "dflash": make_training(rng, 1.0)},
        parameters={"dspark": 41_200_000, "dflash": 16_000_000},
        file_bytes={"dspark": 82_400_000, "dflash": 32_000_000},
        seconds_total=2411.7,
        stage_seconds={"prompts": 3.1, "responses": 402.0, "extract": 118.4, "train": 1160.0, "calibrate": 40.2, "package": 21.0, "evaluate": 667.0},
        notes=[
            "This run had 20 minutes of training on two cores and about 900 prompts. It shows that the whole line works; more time brings more.",
            "Acceptance grows roughly with the logarithm of training tokens. Published drafters of this kind see a thousand times more text and reach 4 to 6.",
        ],
    )


@pytest.fixture(scope="session")
def bare_report() -> dict[str, Any]:
    """One drafter without confidences; no speed, no calibration, no training summary."""
    return build_report(
        run=make_run().model_copy(update={"drafter": "dflash"}),
        requests=make_requests(6, prompts=1, drafters={"dflash": (-0.2, 7)}, temperatures=[0.0]),
        speeds=[],
        draft_lengths={},
        agreement=None,
        costs=[],
        calibration=None,
        bins=15,
        thresholds=[0.0, 0.5],
        extra={},
        training={},
        parameters={},
        file_bytes={},
        seconds_total=None,
        stage_seconds={},
        notes=[],
    )
