"""vLLM's own counters of speculative decoding, as its /metrics tells them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx

from firesteel.errors import VerificationError

_PREFIX = "vllm:spec_decode_num_"
_LINE = re.compile(r"^(vllm:spec_decode_num_\w+?)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """Rounds, drafted and accepted tokens, and accepted tokens by position; all engines of a server together.

    A server counts what it accepted, drafted tokens behind the end of an answer included.
    """

    drafts: int
    drafted: int
    accepted: int
    by_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds; 1 without rounds."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    def since(self, before: Counters) -> Counters:
        """What was counted in between."""
        # A position that had not been reached before may be missing there.
        early = before.by_position + (0,) * (len(self.by_position) - len(before.by_position))
        return Counters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(a - b for a, b in zip(self.by_position, early, strict=False)),
        )


def parse_counters(text: str) -> Counters | None:
    """The counters in a page of metrics, or None where it has none."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in _LINE.findall(text):
        key = name.removeprefix(_PREFIX)
        place = _POSITION.search(labels)
        if key == "accepted_tokens_per_pos" and place is not None:
            positions[int(place[1])] = positions.get(int(place[1]), 0.0) + float(value)
        else:
            sums[key] = sums.get(key, 0.0) + float(value)
    if not {"drafts", "draft_tokens", "accepted_tokens"} <= sums.keys():
        return None
    by_position = tuple(int(positions.get(k, 0)) for k in range(max(positions, default=-1) + 1))
    return Counters(int(sums["drafts"]), int(sums["draft_tokens"]), int(sums["accepted_tokens"]), by_position)


def read_counters(url: str) -> Counters:
    """The counters of a server.

    Raises:
        VerificationError: it has no metrics, or counts no drafts.
    """
    try:
        answer = httpx.get(f"{url}/metrics", timeout=30, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError as e:
        raise VerificationError(f"{url}/metrics cannot be read: {e}", mend="serve without --disable-log-stats; a proxy must let /metrics through") from None
    found = parse_counters(answer.text)
    if found is None:
        raise VerificationError(
            f"{url}/metrics has no counters of speculative decoding ({_PREFIX}...): the server runs without the drafter, or counts nothing",
            mend="start it with --speculative-config and without --disable-log-stats",
        )
    return found
