"""The client of a Mooncake store with a fake of its package: one a process, and what is said where it cannot be had, or data cannot be fetched."""

from __future__ import annotations

import sys
import time

import pytest
from mooncake_fake import Fake, install

from firesteel.errors import HiddenStateError, ResourceError
from firesteel.hidden import mooncake
from firesteel.hidden.exchange import Exchange, Marker, open_exchange


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(mooncake, "_AGAIN", 0.0)
    return install(monkeypatch)


def opened(**changes: object) -> Exchange:
    return open_exchange({"mooncake": {"master": "10.0.0.7:50051", "address": "10.0.0.9", **changes}})


def test_exchanges_of_the_same_settings_share_a_client_that_the_last_one_closes(fake: Fake) -> None:
    first, second, lender = opened(), opened(), opened(segment=1 << 20)
    assert sorted(fake.joined) == [0, 1 << 20]
    lender.put("h", b"data")
    first.close()
    first.close()  # once more: not in the other's name
    assert second.get("h") == b"data"
    second.close()
    assert fake.joined == [1 << 20]
    third = opened()
    assert fake.setups == [0, 1 << 20, 0], "who comes later joins anew"
    third.close()
    lender.close()
    assert fake.joined == []


def test_what_is_there_and_cannot_be_fetched_is_said_with_the_setting(fake: Fake) -> None:
    exchange = opened()
    assert exchange.look("h") is None, "nobody has left anything yet"
    assert exchange.take("h") is None
    exchange.put("h", b"data")
    fake.held |= {"h/marker", "h/states"}
    for ask in (exchange.look, exchange.get, exchange.take):
        with pytest.raises(ResourceError, match=r"10\.0\.0\.7:50051 knows h/.* does not give it to this one .10\.0\.0\.9, tcp.") as e:
            ask("h")
        assert "hidden.mooncake.address on each machine" in str(e.value.mend)
    fake.held.clear()
    assert exchange.look("h") == Marker(4)
    assert exchange.take("h") == (Marker(4), b"data")
    exchange.fail("lost", "the disk is full", again=True)
    assert exchange.take("lost") == (Marker(0, "the disk is full", True), b"")
    exchange.remove("h")
    assert exchange.take("h") is None
    exchange.close()


def test_a_failure_that_passes_is_none(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = opened()
    exchange.put("h", b"data")
    exchange.put("gone", b"data")
    fake.held |= {"h/states", "gone/states"}

    def passes(seconds: float) -> None:
        fake.held.discard("h/states")
        fake.objects.pop("gone/states", None)

    monkeypatch.setattr(time, "sleep", passes)
    assert exchange.take("h") == (Marker(4), b"data"), "what did not come with its marker is asked for by itself"
    fake.objects["gone/states"] = b"data"
    with pytest.raises(HiddenStateError, match="gone was deleted before it was fetched"):
        exchange.get("gone")
    exchange.close()


def test_a_damaged_marker_is_said_as_in_a_folder(fake: Fake) -> None:
    exchange = opened()
    fake.objects["h/marker"] = b"{"
    marker = exchange.look("h")
    assert marker is not None
    assert "its marker is damaged" in str(marker.error)
    exchange.close()


def test_a_mooncake_that_cannot_be_imported_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ResourceError, match="but Mooncake cannot be imported: ") as e:
        opened()
    assert "pip install 'firesteel[mooncake]'" in str(e.value.mend)
    assert "libibverbs1" in str(e.value.mend)
