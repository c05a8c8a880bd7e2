"""A synthetic run: nine domains, two drafters, known truth, made from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from firesteel.evaluation.calibration import calibration_arrays, fit_temperatures, measure_calibration
from firesteel.evaluation.records import PLAIN, RequestRecord, RoundRecord, SpeedRecord
from firesteel.evaluation.report import build_report
from firesteel.evaluation.schema import Cost, Machine, Run, TargetFacts, Training, TrainingPoint

DOMAINS = ["code", "math_reasoning", "qa", "question", "rag", "summarization", "tool_call", "translation", "writing"]
QUALITY = dict(zip(DOMAINS, [0.74, 0.71, 0.55, 0.5, 0.66, 0.6, 0.8, 0.52, 0.45], strict=True))


def make_request(rng: np.random.Generator, domain: str, number: int, *, drafter: str, temperature: float, quality: float, width: int) -> RequestRecord:
    """One answer of about 96 tokens; every drafted token survives with its own probability, which its confidence overstates."""
    rounds: list[RoundRecord] = []
    left = 96
    while left > 0:
        p = np.clip(quality - 0.04 * np.arange(width) + 0.18 * rng.standard_normal(width), 0.03, 0.97)
        accepted = min(int(np.cumprod(rng.random(width) < p).sum()), left)
        told = p**2 / (p**2 + (1 - p) ** 2) if drafter == "dspark" else None  # the logit doubled: too sure of itself, temperature 2
        rounds.append(RoundRecord(drafted=width, accepted=accepted, confidences=None if told is None else [float(c) for c in told]))
        left -= accepted + 1
    reason = "length" if rng.random() < 0.3 else "stop"
    return RequestRecord(domain, f"{domain}-{number}", drafter, temperature, 97, reason, rounds)


def make_requests(seed: int, *, prompts: int, drafters: dict[str, tuple[float, int]], temperatures: list[float]) -> list[RequestRecord]:
    rng = np.random.default_rng(seed)
    return [
        make_request(rng, domain, n, drafter=drafter, temperature=t, quality=QUALITY[domain] + shift - 0.05 * t, width=width)
        for drafter, (shift, width) in drafters.items()
        for t in temperatures
        for domain in DOMAINS
        for n in range(prompts)
    ]


def make_speeds(seed: int, *, lengths: dict[str, list[int]]) -> list[SpeedRecord]:
    rng = np.random.default_rng(seed)
    records = []
    for domain in DOMAINS:
        for repeat in range(2):
            base = 0.024 * 95 * rng.uniform(0.96, 1.05)
            records.append(SpeedRecord(f"{domain}-0", domain, PLAIN, repeat, 0, 96, 0.11 * rng.uniform(0.9, 1.1), base))
            for drafter, tried in lengths.items():
                for n in tried:
                    gain = 1.12 + 0.9 * (QUALITY[domain] - 0.55) - 0.018 * (n - 4) ** 2 - (0.12 if drafter == "dflash" else 0.0)
                    records.append(SpeedRecord(f"{domain}-0", domain, drafter, repeat, n, 96, 0.13, base / gain * rng.uniform(0.97, 1.03)))
    return records


def make_run() -> Run:
    return Run(
        recipe="quickstart",
        seed=0,
        date="2026-05-04T09:12:45Z",
        command="firesteel run quickstart train.max_minutes=20 target.model=HuggingFaceTB/SmolLM2-135M-Instruct",
        drafter="dspark",
        temperature=0.0,
        max_new_tokens=96,
        bootstrap=400,
        target=TargetFacts(
            name="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision=None,
            fingerprint="9f1c2a77d0b84c6fa1e35d2c8890aa41",
            architecture="LlamaForCausalLM",
            parameters=134_515_008,
            layers=30,
            hidden_size=576,
            vocab_size=49152,
            dtype="float32",
        ),
        versions={"firesteel": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "transformers": "5.19.0"},
        machine=Machine(cpu="AMD EPYC 7763 64-Core Processor", cores=2, memory_gb=16.7, accelerator=None, system="Linux 6.1.0"),
    )


def make_training(rng: np.random.Generator, top: float) -> Training:
    steps = list(range(200, 2600, 200))
    curve = [TrainingPoint(step=s, seconds=s * 0.46, acceptance_length=float(1 + top * (1 - np.exp(-s / 700)) + 0.02 * rng.standard_normal())) for s in steps]
    return Training(steps=2500, seconds=1160.0, tokens=5_120_000, stopped_by="train.max_minutes", best_step=2400, curve=curve)


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
        costs=[Cost(length=n, verify_ms=23.5 + 2.1 * n, draft_ms=None if n == 0 else 5.2) for n in range(9)],
        calibration=measure_calibration(
            logits, survived, mask, temperatures=fit_temperatures(*fitted, bins=15), bins=15, measured_on="18 held-out answers that took no part in the fit"
        ),
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
        costs=[],
        calibration=None,
        thresholds=[0.0, 0.5],
        extra={},
        training={},
        parameters={},
        file_bytes={},
        seconds_total=None,
        stage_seconds={},
        notes=[],
    )
