"""A synthetic run: nine domains, two drafters, known truth, made from a seed."""

from __future__ import annotations

import numpy as np

from firesteel.evaluation.records import PLAIN, RequestRecord, RoundRecord, SpeedRecord
from firesteel.evaluation.schema import Machine, Run, TargetFacts, Training, TrainingPoint

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
