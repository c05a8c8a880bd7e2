"""The hardware table: what one accelerator of a kind can do at most, and which share of that is counted on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from firesteel.errors import RecipeError

TABLE = Path(__file__).parent / "hardware.yaml"
LARGEST_SHARE = 2.0  # of a peak, which is a product's that was measured, not the fastest there is


class Efficiency(BaseModel):
    """Shares of a kind's peaks, above 0; `hardware.yaml` says where each comes from. Above 1 only where a measured product was not the fastest."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prefill_experts: float = Field(gt=0, le=LARGEST_SHARE)
    prefill_dense: float = Field(gt=0, le=LARGEST_SHARE)
    head: float = Field(0.5, gt=0, le=LARGEST_SHARE)  # of float32's peak: LM head and normaliser, by the local engine
    training: float = Field(gt=0, le=LARGEST_SHARE)
    muon: float = Field(gt=0, le=LARGEST_SHARE)
    bandwidth: float = Field(gt=0, le=1)
    network: float = Field(gt=0, le=1)
    memory: float = Field(gt=0, le=1)


class Hardware(BaseModel):
    """A row of the table. FLOP/s, bytes and bytes/s; of one accelerator, but for `network`, which is a node's."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    about: str
    per_node: int = Field(ge=1)
    memory: float = Field(gt=0)
    flops: dict[str, float]
    bandwidth: float = Field(gt=0)
    peer: float = Field(gt=0)
    network: float = Field(gt=0)
    efficiency: Efficiency

    def peak(self, precision: str) -> float:
        """FLOP/s in a precision, or in the next wider one that the hardware multiplies: 4 bits become bf16 where there is no fp4 unit."""
        order = {"fp4": ("fp4", "bf16", "fp32"), "fp8": ("fp8", "bf16", "fp32"), "bf16": ("bf16", "fp32"), "fp32": ("fp32",)}[precision]
        return next(self.flops[name] for name in order if name in self.flops)


def load_hardware(extra: str | None = None) -> dict[str, Hardware]:
    """The table by kind, with a user's file over it.

    Args:
        extra: `cluster.hardware`.

    Raises:
        RecipeError: the file is missing, no YAML, or a row lacks something.
    """
    rows: dict[str, Any] = yaml.safe_load(TABLE.read_text())
    if extra is not None:
        try:
            own = yaml.safe_load(Path(extra).expanduser().read_text())
        except (OSError, yaml.YAMLError) as e:
            raise RecipeError(f"cluster.hardware={extra} cannot be read: {e}", mend="give a YAML file with rows as in firesteel/cluster/hardware.yaml") from e
        if not isinstance(own, dict):
            raise RecipeError(f"cluster.hardware={extra} holds no rows", mend="one row a kind, as in firesteel/cluster/hardware.yaml")
        rows |= own
    table = {}
    for kind, row in rows.items():
        try:
            table[str(kind)] = Hardware.model_validate(row)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(map(str, (kind, *first["loc"])))
            raise RecipeError(f"cluster.hardware={extra}: {where}: {first['msg']}", mend="rows look as in firesteel/cluster/hardware.yaml") from None
        if "fp32" not in table[str(kind)].flops:
            raise RecipeError(f"cluster.hardware={extra}: {kind}.flops lacks fp32", mend="give the float32 peak at least")
    return table
