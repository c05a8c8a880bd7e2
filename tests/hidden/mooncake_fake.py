"""The package `mooncake` as far as we use it, in memory: one store for everybody in this process."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from firesteel.hidden import mooncake


@dataclass
class Fake:
    """What everybody sees.

    Attributes:
        objects: by key.
        held: keys whose data cannot be had, because the machine that holds them is out of reach.
        cut: this is so for all keys.
        setups: segment sizes of those who joined, in order.
        joined: segment sizes of those who are in.
        most: clients without a segment (trainers) at once.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    cut: bool = False
    setups: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    most: int = 0


def install(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put it in Mooncake's place; its master always answers."""
    fake = Fake()

    class Store:
        def setup(self, address: str, metadata: str, segment: int, buffer: int, protocol: str, device: str, master: str) -> int:
            self.segment = segment
            fake.setups.append(segment)
            fake.joined.append(segment)
            fake.most = max(fake.most, fake.joined.count(0))
            return 0

        def put(self, key: str, data: bytes, config: Any) -> int:
            assert config.with_hard_pin
            assert key not in fake.objects
            fake.objects[key] = data
            return 0

        def is_exist(self, key: str) -> int:
            return int(key in fake.objects)

        def get(self, key: str) -> bytes:
            return b"" if fake.cut or key in fake.held else fake.objects.get(key, b"")

        def get_batch(self, keys: list[str]) -> list[bytes]:
            return [self.get(key) for key in keys]

        def batch_remove(self, keys: list[str], force: bool) -> list[int]:
            return [self.remove(key, force) for key in keys]

        def remove(self, key: str, force: bool) -> int:
            assert force
            fake.objects.pop(key, None)
            return 0

        def close(self) -> None:
            fake.joined.remove(self.segment)

    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore, module.ReplicateConfig = Store, types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(mooncake, "check_master", lambda master: None)
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "")  # what joining sets, is set back
    return fake
