"""What a step of the engine costs: steps per second against tokens per step, SPS(B), measured once and kept on file.

A scheduler asks the profile what a longer step would cost before it makes one (DSpark, arXiv 2607.05147, calls the curve SPS(B)).
The file holds the medians as they were measured. What the scheduler reads is a curve through them that never falls: a step with
more tokens does all the work of one with fewer, so that a fall between two neighbours is noise of the measurement.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firesteel.artifact import hash_json, write_atomic
from firesteel.decoding.protocol import Drafter, Target
from firesteel.errors import DataError, RecipeError

Floats = NDArray[np.float64]
Origin = Literal["measured", "interpolated", "extrapolated"]
FORMAT_VERSION = 1
_TABLE = 2048


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in least squares, by pooling neighbours that are out of order."""
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] >= mean:
            before, more = pools.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


@dataclass(frozen=True)
class Curve:
    """Seconds against size, measured at some sizes.

    Attributes:
        sizes: ascending, at least 1.
        seconds: median of each size, as measured.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or len(self.sizes) != len(self.seconds) or self.sizes[0] < 1 or not ascending or not all(0 < s < float("inf") for s in self.seconds):
            raise DataError(f"a cost curve with sizes {list(self.sizes)} and seconds {list(self.seconds)} is not one", mend="measure it again")

    @cached_property
    def smooth(self) -> Floats:
        """Seconds of the measured sizes, made non-decreasing."""
        return np.array(isotonic(self.seconds))

    def at(self, sizes: ArrayLike) -> Floats:
        """Seconds of any sizes (an array of any shape, or a number).

        Between two measured sizes a straight line. Below the smallest, its own time. Beyond the largest, time in proportion to
        size: no gain from batching is assumed where none was measured, so that a guess there never invites a longer step.
        """
        wanted = np.asarray(sizes)
        if wanted.dtype.kind == "i" and wanted.size and wanted.min() >= 0 and wanted.max() < _TABLE:
            found: Floats = self._table[wanted]
            return found
        return self._between(wanted.astype(np.float64))

    @cached_property
    def _table(self) -> Floats:
        """Of the sizes that steps have: a scheduler asks several times a step."""
        return self._between(np.arange(_TABLE, dtype=np.float64))

    def _between(self, wanted: Floats) -> Floats:
        return np.interp(wanted, self.sizes, self.smooth) * np.maximum(1.0, wanted / self.sizes[-1])

    def origin(self, size: int) -> Origin:
        """Where the figure for this size comes from."""
        if size in self.sizes:
            return "measured"
        return "interpolated" if self.sizes[0] < size < self.sizes[-1] else "extrapolated"


@dataclass(frozen=True)
class ProfileKey:
    """What a profile is true of; measure again where any of it differs.

    Attributes:
        machine: processor or accelerator, with what is used of it (cores, threads).
        model: fingerprint of the target, and precision.
        engine: name of the engine.
        shape: what else the times depend on: the context's length, the requests of a step, the drafter and its draft length, the threads and kernels of a step.
    """

    machine: str
    model: str
    engine: str
    shape: str

    @property
    def file(self) -> str:
        return f"sps-{hash_json(asdict(self))[:16]}.json"


@dataclass(frozen=True)
class Profile:
    """Costs of a step.

    Attributes:
        step: seconds of the target's pass, with the choice of tokens, against tokens in it (of all requests together).
        draft: seconds of drafting, with observing a round's tokens, against requests that are drafted for at full draft length;
            None: no drafter was measured, drafting counts as free.
    """

    step: Curve
    draft: Curve | None = None

    def seconds(self, tokens: ArrayLike, drafting: ArrayLike = 0) -> Floats:
        """Seconds of steps over `tokens` tokens for which `drafting` requests were drafted for (arrays that broadcast)."""
        requests = np.asarray(drafting)
        return self.step.at(tokens) + (0.0 if self.draft is None else np.where(requests > 0, self.draft.at(requests), 0.0))

    def steps_per_second(self, tokens: ArrayLike, drafting: ArrayLike = 0) -> Floats:
        """SPS(B), with the drafter's share."""
        return 1.0 / self.seconds(tokens, drafting)

    def describe(self) -> str:
        """One line for people: what was measured, and what happens beyond."""
        s, d = self.step, self.draft
        drafting = "no drafter measured" if d is None else f"drafting measured for {d.sizes[0]} to {d.sizes[-1]} requests"
        return (
            f"steps of {s.sizes[0]} to {s.sizes[-1]} tokens measured ({1 / s.smooth[0]:.4g} to {1 / s.smooth[-1]:.4g} steps/s; {drafting}); "
            "longer ones are assumed to take time in proportion"
        )


def measure_curve(step: Callable[[int], object], sizes: Sequence[int], *, repeats: int, before: Callable[[int], object] | None = None) -> Curve:
    """Time `step(size)` for each size, `repeats` times in turn, so that a slow moment of the machine meets all alike; medians.

    The first turn warms kernels and caches up and is not counted. `step` must return only when the work is done. `before(size)` is run before
    each and is not timed.

    Raises:
        RecipeError: no sizes or repeats, or a size below 1.
    """
    wanted = sorted(set(sizes))
    if not wanted or wanted[0] < 1 or repeats < 1:
        raise RecipeError(f"cannot measure steps of {list(sizes)} tokens {repeats} times", mend="give sizes and repeats of 1 or more")
    times: dict[int, list[float]] = {n: [] for n in wanted}
    for turn in range(repeats + 1):
        for n in wanted:
            if before is not None:
                before(n)
            begin = time.perf_counter()
            step(n)
            if turn:
                times[n].append(time.perf_counter() - begin)
    return Curve(tuple(wanted), tuple(statistics.median(times[n]) for n in wanted))


def measure_profile(target: Target, drafter: Drafter | None, prompt_ids: Sequence[int], *, draft_tokens: int, repeats: int) -> Profile:
    """Profile of the reference engine: one request after `prompt_ids`, steps of 1 to `draft_tokens + 1` tokens, greedily.

    Both sessions are rewound to the prompt's end.

    Raises:
        RecipeError: no draft tokens or repeats.
    """
    target.rewind(0)
    first = target.forward(prompt_ids, keep=1)
    start, anchor = target.length, int(first.logits[-1].argmax())
    aux = first.aux

    def verify(tokens: int) -> None:
        target.forward([anchor] * tokens).logits.argmax(-1).tolist()
        target.rewind(start)

    step = measure_curve(verify, range(1, draft_tokens + 2), repeats=repeats)
    if drafter is None:
        return Profile(step)
    drafter.rewind(0)
    drafter.observe(prompt_ids, aux)
    # Of a round, as many positions are observed as it can add.
    seen = target.forward([anchor] * (draft_tokens + 1)).aux
    target.rewind(start)

    def propose(_: int) -> None:
        drafter.draft(anchor, draft_tokens, temperature=0.0, generator=None)
        drafter.observe([anchor] * (draft_tokens + 1), seen)
        drafter.rewind(start)

    return Profile(step, measure_curve(propose, [1], repeats=repeats))


def save_profile(folder: Path, key: ProfileKey, profile: Profile) -> Path:
    """Write a profile; the folder is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / key.file
    content = {"format_version": FORMAT_VERSION, "key": asdict(key), "step": asdict(profile.step), "draft": profile.draft and asdict(profile.draft)}
    write_atomic(path, json.dumps(content | {"about": profile.describe()}, indent=1) + "\n")
    return path


def load_profile(folder: Path, key: ProfileKey) -> Profile | None:
    """The profile stored under this key; None where there is none.

    Raises:
        DataError: the file is damaged, or says another key.
    """
    path = folder / key.file
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if content["format_version"] != FORMAT_VERSION or content["key"] != asdict(key):
            raise DataError(f"{path} is the profile of something else", mend=f"delete {path}; it is measured again")
        curves = [None if c is None else Curve(tuple(c["sizes"]), tuple(c["seconds"])) for c in (content["step"], content["draft"])]
    except (ValueError, KeyError, TypeError) as e:
        raise DataError(f"{path} is damaged: {e}", mend=f"delete {path}; it is measured again") from None
    assert curves[0] is not None, "a profile has steps"
    return Profile(curves[0], curves[1])


def stored_profile(folder: Path, key: ProfileKey, measure: Callable[[], Profile]) -> Profile:
    """The profile on file, or a new one, measured and kept."""
    found = load_profile(folder, key)
    if found is None:
        found = measure()
        save_profile(folder, key, found)
    return found
