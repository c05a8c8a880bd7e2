"""Contract: what training promised and serving must keep, as `firesteel.json` beside a checkpoint.

Whoever serves a drafter with other layer ids, another anchor rule or another target gets a low acceptance and no error;
the contract turns that into an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from firesteel.artifact import package_versions
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.layer_json import window_of
from firesteel.errors import CheckpointError
from firesteel.target.spec import TargetSpec

_THINKING = ("enable_thinking", "thinking")  # what templates call it


class Part(BaseModel):
    """Immutable; refuses keys it does not know and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Promise(Part):
    """What validation measured: the acceptance length (the target's own token included) that the served drafter must reach."""

    acceptance_length: float = Field(ge=1)
    rounds: int = Field(ge=1)
    accepted: int = Field(ge=0)
    draft_length: int = Field(ge=1)
    temperature: float = Field(ge=0)
    measured_on: str


class CalibrationRow(Part):
    """One drafted position: calibration error and AUC of the predicted survival of its prefix, before and after temperature scaling."""

    position: int = Field(ge=1)
    rounds: int = Field(ge=0)
    ece_before: float | None
    ece_after: float | None
    auc_before: float | None
    auc_after: float | None


class CalibrationTable(Part):
    """What temperature scaling of the confidences changed, position by position, and on which rounds that was measured."""

    bins: int = Field(ge=1)
    measured_on: str
    positions: tuple[CalibrationRow, ...]


class Contract(Part):
    """The train/serve contract.

    Attributes:
        target_name: what the target was loaded from.
        target_fingerprint: names the target's weights.
        target_softcap, target_logit_scale: how the target forms its logits; the drafter's own are neither capped nor scaled.
        layer_ids: captured layers; `layer_convention` says how they count: id i is Transformers' `hidden_states[i]`,
            the state before layer i (0 = embeddings, number of layers = after the last, before the final norm).
        captured_stream: which states the drafter reads at those layers.
        sample_from_anchor: True: slot k predicts the token k + 1 after the anchor.
        causal: slots of a block see only earlier slots of it.
        thinking: mode of the chat template that the training answers were made in; None where it was left to the template.
        template_options: what the chat template was told then (`target.template_options`).
        temperatures: `[drafts]` sequential temperature scaling of the confidences; empty where not calibrated.
        calibration: what it changed; None where not calibrated, and in files older than this field.
        promise: what validation measured, or None.
        speculative_tokens: tokens to draft per round when served.
        versions: packages that trained it.
    """

    target_name: str
    target_fingerprint: str
    target_architecture: str
    target_layers: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_softcap: float | None
    target_logit_scale: float
    layer_ids: tuple[int, ...]
    layer_convention: Literal["hidden_states"]
    captured_stream: Literal["residual"]
    block_size: int
    mask_token_id: int | None
    sample_from_anchor: bool
    causal: bool
    sliding_window: int | None
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    thinking: Literal["on", "off"] | None
    template_options: dict[str, bool | int | str] = Field(default_factory=dict)
    temperatures: tuple[float, ...]
    calibration: CalibrationTable | None = None
    promise: Promise | None
    speculative_tokens: int = Field(ge=1)
    versions: dict[str, str]


def make_contract(
    config: DraftConfig,
    target: TargetSpec,
    *,
    template_options: Mapping[str, bool | int | str],
    temperatures: tuple[float, ...],
    promise: Promise | None,
    speculative_tokens: int,
    calibration: CalibrationTable | None = None,
) -> Contract:
    """The contract of a drafter trained with `config` for `target`.

    Raises:
        CheckpointError: config and target contradict each other, or more tokens are to be served than a block drafts.
    """
    contract = Contract(
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        target_architecture=target.architecture,
        target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        target_softcap=target.softcap,
        target_logit_scale=target.logit_scale,
        draft_vocab_size=config.draft_vocab_size,
        layer_ids=config.layer_ids,
        layer_convention="hidden_states",
        captured_stream="residual",
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        sample_from_anchor=config.sample_from_anchor,
        causal=config.causal,
        sliding_window=window_of(config),
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        thinking=thinking_mode(template_options),
        template_options=dict(template_options),
        temperatures=temperatures,
        calibration=calibration,
        promise=promise,
        speculative_tokens=speculative_tokens,
        versions=package_versions(),
    )
    check_contract(contract, config)
    return contract


def thinking_mode(options: Mapping[str, bool | int | str]) -> Literal["on", "off"] | None:
    """Whether answers are made with thinking; None where that is left to the template."""
    said = next((options[name] for name in _THINKING if name in options), None)
    return ("on" if said else "off") if isinstance(said, bool) else None


def read_contract(data: dict[str, Any], *, where: str) -> Contract:
    """A contract from its JSON.

    Raises:
        CheckpointError: a field is unknown, missing or of the wrong type; names it.
    """
    try:
        return Contract.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        field = ".".join(str(p) for p in first["loc"])
        raise CheckpointError(f"{where}: contract.{field}: {first['msg']}", mend="the file was edited, or written by another version of Firesteel") from None


def check_contract(contract: Contract, config: DraftConfig) -> None:
    """Contract and drafter configuration say the same.

    Raises:
        CheckpointError: names the first field that differs, with both values.
    """
    for name in ("target_hidden_size", "vocab_size", "draft_vocab_size", "layer_ids", "block_size", "mask_token_id", "sample_from_anchor", "causal"):
        _same(name, getattr(contract, name), getattr(config, name))
    _same("sliding_window", contract.sliding_window, window_of(config))
    _same("rope_theta", contract.rope_theta, config.rope_theta)
    _same("rope_scaling", contract.rope_scaling, config.rope_scaling)
    if max(config.layer_ids) > contract.target_layers:
        raise CheckpointError(f"layer_ids has {max(config.layer_ids)}, but the contract's target_layers is {contract.target_layers}")
    if contract.speculative_tokens > config.num_drafts:
        raise CheckpointError(
            f"speculative_tokens={contract.speculative_tokens}, but a block of {config.block_size} slots drafts {config.num_drafts} tokens",
            mend=f"set package.speculative_tokens to at most {config.num_drafts}",
        )
    if len(contract.temperatures) not in (0, config.num_drafts):
        raise CheckpointError(f"temperatures has {len(contract.temperatures)} values, a block drafts {config.num_drafts} tokens")
    measured = [] if contract.calibration is None else [row.position for row in contract.calibration.positions]
    if measured != list(range(1, len(measured) + 1)) or len(measured) > len(contract.temperatures):
        raise CheckpointError(f"calibration has positions {measured}, there are temperatures for {len(contract.temperatures)}")


def _same(name: str, contract: object, config: object) -> None:
    if contract != config:
        raise CheckpointError(f"{name} is {contract!r} in the contract, {config!r} in the drafter's configuration")
