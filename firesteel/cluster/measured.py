"""What `firesteel plan --measure` found out about this machine: kept in a file, and put in place of the row `cpu` of the hardware table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from firesteel.artifact import write_atomic
from firesteel.cluster.hardware import LARGEST_SHARE, Efficiency, Hardware
from firesteel.cluster.topology import CPU
from firesteel.errors import ArtifactError

FILE = "measured.json"


@dataclass(frozen=True)
class Measured:
    """A calibration.

    Attributes:
        machine: its processor, for people.
        threads: that were used.
        memory: bytes of the machine.
        fp32, bf16: FLOP/s of large products.
        bandwidth: bytes/s of a copy, read and written.
        prefill: share of the products' rate that the target's layers reached; above 1 is possible where caches help.
        head: FLOP/s of the LM head with the normaliser, in float32.
        training: share of the products' rate that a training step reached, without the optimizer.
        bandwidth_share, muon: shares that the optimizer's step reached of `bandwidth` (AdamW), and of the products' rate (Muon).
        train_seconds, update_seconds, prefill_seconds: what was measured: a step, the optimizer's part of it, and the layers; sizes in `about`.
    """

    machine: str
    threads: int
    memory: float
    fp32: float
    bf16: float
    bandwidth: float
    prefill: float
    head: float
    training: float
    bandwidth_share: float
    muon: float
    train_seconds: float
    update_seconds: float
    prefill_seconds: float
    about: str

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.machine}, {self.threads} thread(s): products {self.fp32 / 1e9:,.0f} GFLOP/s in float32 and {self.bf16 / 1e9:,.0f} in bfloat16, "
            f"memory {self.bandwidth / 1e9:,.1f} GB/s; {self.about}: reading {self.prefill_seconds:.2f} s, "
            f"a training step {self.train_seconds:.2f} s ({self.update_seconds:.2f} of it the optimizer)"
        )


def write_measured(cache_dir: str, found: Measured) -> Path:
    """Keep a calibration in the cache folder; returns the file."""
    path = Path(cache_dir).expanduser() / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(found), indent=1))
    return path


def read_measured(cache_dir: str) -> Measured | None:
    """The calibration of this machine, if one was made.

    Raises:
        ArtifactError: the file is not one.
    """
    path = Path(cache_dir).expanduser() / FILE
    if not path.is_file():
        return None
    try:
        return Measured(**json.loads(path.read_text()))
    except (ValueError, TypeError) as e:
        raise ArtifactError(f"{path} is not a calibration: {e}", mend="delete it, and run `firesteel plan RECIPE --measure` again") from e


def apply_measured(table: Mapping[str, Hardware], found: Measured | None) -> dict[str, Hardware]:
    """The table with the row `cpu` as measured."""
    if found is None:
        return dict(table)
    row = table[CPU]
    shares = {
        "prefill_experts": found.prefill * row.efficiency.prefill_experts / row.efficiency.prefill_dense,  # experts were not measured: the table's ratio
        "prefill_dense": found.prefill,
        "head": found.head / found.fp32,
        "training": found.training,
        "muon": found.muon,
    }
    efficiency = Efficiency(
        **{name: min(share, LARGEST_SHARE) for name, share in shares.items()},
        bandwidth=min(found.bandwidth_share, 1.0),  # weights that stay in a cache are moved faster than the copy was
        network=row.efficiency.network,
        memory=row.efficiency.memory,
    )
    measured = row.model_copy(
        update={
            "about": f"{found.machine}, measured",
            "memory": found.memory,
            "flops": {"fp32": found.fp32, "bf16": found.bf16},
            "bandwidth": found.bandwidth,
            "efficiency": efficiency,
        }
    )
    return {**table, CPU: measured}
