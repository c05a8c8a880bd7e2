"""The schema of `report.json`, as typed parts. `docs/report.md` explains every key.

A key is always there; what was not measured is null, an empty list or an empty object, never 0. A change of the schema
raises `SCHEMA_VERSION`. The parts are also what the statistics return and what stages hand in, so there is one set of types.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 3
Interval = tuple[float, float]


class Part(BaseModel):
    """A piece of the report: immutable, refuses keys it does not know and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AcceptanceLength(Part):
    """Tokens per target step, the target's own included, by both definitions in use."""

    pooled: float
    interval: Interval | None
    mean_of_requests: float
    interval_mean_of_requests: Interval | None
    draft_length: int
    requests: int
    rounds: int
    drafted: int
    accepted: int


class PositionRate(Part):
    """`accepted` of `of` rounds at one position (from 1)."""

    position: int
    accepted: int
    of: int
    rate: float | None


class Positions(Part):
    """Acceptance position by position."""

    unconditional: list[PositionRate]
    conditional: list[PositionRate]


class Speed(Part):
    """Decoding speed with and without the drafter, on the same prompts."""

    draft_length: int
    prompts: int
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    pooled: float
    interval: Interval | None
    pooled_with_prefill: float
    interval_with_prefill: Interval | None


class Agreement(Part):
    """Greedy drafted answers that were compared with plain ones to the same prompts, and how many of them differ."""

    compared: int
    differing: int


class Domain(Part):
    """One domain of prompts, headline drafter and temperature; `by_drafter` names all drafters."""

    requests: int
    new_tokens: int
    finish_reasons: dict[str, int]
    acceptance_length: AcceptanceLength | None
    by_drafter: dict[str, AcceptanceLength]
    positions: Positions
    speed: Speed | None


class ReliabilityPoint(Part):
    """A bin of predictions: what was predicted, what happened."""

    low: float
    high: float
    count: int
    predicted: float
    observed: float
    interval: Interval | None


class ConfidencePosition(Part):
    """How well the predicted survival of the prefix of this length matches what happened while prompts were answered."""

    position: int
    rounds: int
    survived: float | None
    predicted: float | None
    ece: float | None
    auc: float | None


class Confidence(Part):
    """The confidences that a drafter decoded with, against what became of its drafts. `ece` and `auc` are means over positions,
    `ece_pooled` and `auc_pooled` those of all positions' predictions taken together."""

    bins: int
    rounds: int
    ece: float | None
    auc: float | None
    ece_pooled: float | None
    auc_pooled: float | None
    positions: list[ConfidencePosition]
    reliability: list[ReliabilityPoint]


class Drafter(Part):
    """One drafter, at the headline temperature."""

    acceptance_length: AcceptanceLength | None
    positions: Positions
    confidence: Confidence | None
    speedup: Speed | None
    speed_by_length: list[Speed]
    parameters: int | None
    file_bytes: int | None


class Comparison(Part):
    """Pooled acceptance length of `first` over that of `second`, on the prompts both answered."""

    first: str
    second: str
    first_pooled: float
    second_pooled: float
    ratio: float
    interval: Interval | None
    prompts: int
    unpaired: int


class TemperatureRow(Part):
    """Acceptance of one drafter at one sampling temperature."""

    temperature: float
    drafter: str
    acceptance_length: AcceptanceLength | None


class CalibrationPosition(Part):
    """How well the predicted survival of the prefix of this length matches what happened."""

    position: int
    rounds: int
    survived: float | None
    predicted_before: float | None
    predicted_after: float | None
    ece_before: float | None
    ece_after: float | None
    auc_before: float | None
    auc_after: float | None


class Calibration(Part):
    """Sequential temperature scaling and what it changed. `ece_*` and `auc_*` are means over positions."""

    temperatures: list[float]
    bins: int
    measured_on: str
    ece_before: float | None
    ece_after: float | None
    auc_before: float | None
    auc_after: float | None
    positions: list[CalibrationPosition]
    reliability_before: list[ReliabilityPoint]
    reliability_after: list[ReliabilityPoint]


class SweepRow(Part):
    """What a threshold on prefix survival would do, per round."""

    threshold: float
    rounds: int
    verified: float
    acceptance_length: float
    wasted: float


class Cost(Part):
    """Milliseconds of one target step that verifies `length` drafted tokens (0 is a plain step), and of drafting them."""

    length: int
    verify_ms: float
    draft_ms: float | None


class ExtraSet(Part):
    """One more set of prompts; all but `by_drafter` is of the headline drafter."""

    requests: int
    new_tokens: int
    finish_reasons: dict[str, int]
    by_drafter: dict[str, AcceptanceLength]
    positions: Positions


class TrainingPoint(Part):
    """One validation."""

    step: int
    seconds: float
    acceptance_length: float


class Training(Part):
    """How a drafter was trained."""

    steps: int
    seconds: float
    tokens: int
    stopped_by: str | None
    best_step: int | None
    curve: list[TrainingPoint]


class TargetFacts(Part):
    """The frozen target."""

    name: str
    revision: str | None
    fingerprint: str
    architecture: str | None
    parameters: int | None
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    dtype: str | None


class Machine(Part):
    """What the numbers were measured on."""

    cpu: str
    cores: int
    memory_gb: float | None
    accelerator: str | None
    system: str


class Run(Part):
    """Where the numbers come from."""

    recipe: str
    seed: int
    date: str
    command: str
    drafter: str
    temperature: float
    max_new_tokens: int
    bootstrap: int
    target: TargetFacts
    versions: dict[str, str]
    machine: Machine


class Report(Part):
    """The whole of `report.json`."""

    schema_version: int
    run: Run
    acceptance_length: AcceptanceLength | None
    speedup: Speed | None
    agreement: Agreement | None
    finish_reasons: dict[str, int]
    domains: dict[str, Domain]
    positions: Positions
    drafters: dict[str, Drafter]
    comparisons: list[Comparison]
    temperatures: list[TemperatureRow]
    calibration: Calibration | None
    confidence: Confidence | None
    sweep: list[SweepRow]
    costs: list[Cost]
    extra: dict[str, ExtraSet]
    training: dict[str, Training]
    seconds_total: float | None
    stage_seconds: dict[str, float]
    notes: list[str]
