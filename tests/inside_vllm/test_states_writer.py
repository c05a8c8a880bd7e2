"""The worker's side without vLLM: states out of a paged cache, markers for whatever goes wrong, backpressure, leases."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from firesteel.errors import HiddenStateError, ResourceError
from firesteel.hidden.codec import decode_states
from firesteel.hidden.exchange import FolderExchange, Marker
from firesteel.hidden.wire import Wanted, unpack
from firesteel.inside_vllm import writer as writers
from firesteel.inside_vllm.plan import Save
from firesteel.inside_vllm.writer import Writer, gather

SIZE, IDS, D = 4, 3, 8


def paged(length: int, blocks: list[int], seed: int = 0, layout: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """States `[T, n_ids, d]` of a sequence, and a cache that has them in these blocks (in the other memory order with `layout`)."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(length, IDS, D, generator=g)
    cache = torch.full((16, IDS, SIZE, D), float("nan"))
    if layout:
        cache = torch.full((16, SIZE, IDS, D), float("nan")).transpose(1, 2)
    for t in range(length):
        cache[blocks[t // SIZE], :, t % SIZE] = states[t]
    return states, cache


def save(
    handle: str = "h", length: int = 10, blocks: tuple[int, ...] = (5, 2, 9), last: tuple[tuple[int, int], ...] = ((1, 3), (6, 10)), codec: str = "fp32"
) -> Save:
    return Save(Wanted(handle, (1, 2), last, codec), list(range(length)), list(blocks))  # type: ignore[arg-type]


def make(exchange: object, **settings: object) -> Writer:
    return Writer(exchange, [1, 2, 4], 4, "digest", **{"lease": 60.0, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [False, True])
def test_states_are_found_in_scattered_blocks(layout: bool) -> None:
    states, cache = paged(10, [5, 2, 9], layout=layout)
    assert torch.equal(gather(cache, [5, 2, 9], torch.arange(10), [0, 1]), states[:, :2])
    assert torch.equal(gather(cache, [5, 2, 9], torch.tensor([3, 4, 9]), [2]), states[[3, 4, 9]][:, 2:])


@pytest.mark.parametrize(("codec", "bound"), [("fp32", 0.0), ("bf16", 2.0**-8), ("fp8", 2.0**-3)])
def test_a_sample_travels_with_its_tokens_and_only_the_last_states_that_are_wanted(tmp_path: Path, codec: str, bound: float) -> None:
    states, cache = paged(10, [5, 2, 9])
    writer = make(FolderExchange(tmp_path))
    writer.submit(save(codec=codec), cache)
    cache.fill_(0)  # its blocks are used again
    writer.finish()
    exchange = FolderExchange(tmp_path)
    marker = exchange.look("h")
    assert marker is not None
    assert marker.error is None
    tensors, header = unpack(exchange.get("h"), "h")
    assert header["target"] == "digest"
    assert tensors["token_ids"].tolist() == list(range(10))
    assert tensors["last_positions"].tolist() == [1, 2, 6, 7, 8, 9]
    aux, last = decode_states(tensors["aux"], tensors.get("aux_scale")), decode_states(tensors["last"], tensors.get("last_scale"))
    assert last.shape == (6, D)
    assert float((aux.float() - states[:, :2]).abs().max()) <= bound * float(states.abs().max())
    assert float((last.float() - states[[1, 2, 6, 7, 8, 9], 2]).abs().max()) <= bound * float(states.abs().max())
    exchange.remove("h")
    exchange.remove("h")
    assert list(tmp_path.iterdir()) == []


def test_overflow_short_blocks_and_a_plan_that_failed_leave_a_marker_that_says_so(tmp_path: Path) -> None:
    _, cache = paged(10, [5, 2, 9])
    cache[2, 1, 1] = float("inf")
    writer, exchange = make(FolderExchange(tmp_path)), FolderExchange(tmp_path)
    writer.submit(save("inf", codec="fp8"), cache)
    writer.submit(save("short", blocks=(5, 2)), cache)
    writer.submit(Save(save().wanted, [], [], "no states in that step"), cache)
    cache[2, 1, 1] = 3.4e38
    writer.submit(save("big", codec="bf16"), cache)
    writer.finish()
    for handle, words, again in (
        ("inf", "not finite", False),
        ("big", "exceed the range of bf16", False),
        ("short", "blocks hold 8", True),
        ("h", "no states in", True),
    ):
        marker = exchange.look(handle)
        assert marker is not None
        assert marker.error is not None
        assert words in marker.error
        assert marker.again is again
        assert not (tmp_path / f"{handle}.states").exists()


class Broken(FolderExchange):
    """Refuses data, and at first markers too."""

    def __init__(self, folder: Path, error: Exception) -> None:
        super().__init__(folder)
        self.error, self.refusals = error, 1

    def put(self, handle: str, data: bytes) -> None:
        raise self.error

    def fail(self, handle: str, error: str, *, again: bool) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise ResourceError("no room for a marker")
        super().fail(handle, error, again=again)


@pytest.mark.parametrize("error", [ResourceError("the store is full"), RuntimeError("something nobody thought of")])
def test_a_full_or_broken_store_is_said_even_if_the_marker_needs_a_second_try(tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_PATIENCE", 0.2)
    _, cache = paged(10, [5, 2, 9])
    writer = make(Broken(tmp_path, error))
    writer.submit(save(), cache)
    writer.finish()
    marker = FolderExchange(tmp_path).look("h")
    assert marker is not None
    assert str(error) in str(marker.error)
    assert marker.again


def marker_of(folder: Path, handle: str = "h") -> Marker:
    found = FolderExchange(folder).look(handle)
    assert found is not None
    return found


@pytest.mark.parametrize("where", ["gather", "_to_host"])
def test_what_breaks_before_anything_is_handed_over_is_said_and_never_reaches_the_engine(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache = paged(10, [5, 2, 9])
    writer = make(FolderExchange(tmp_path), pending=1000)  # one sample has 832 bytes: what failed must not count as waiting

    def broken(*args: object) -> None:
        raise RuntimeError("no pinned memory is left")

    with monkeypatch.context() as m:
        m.setattr(writers if where == "gather" else Writer, where, broken)
        for handle in ("a", "b"):
            writer.submit(save(handle), cache)
    writer.submit(save("c"), cache)
    writer.submit(save("d", last=((5, 99),)), cache)
    writer.finish()
    for handle in ("a", "b"):
        assert marker_of(tmp_path, handle) == Marker(error="RuntimeError: no pinned memory is left", again=True)
    assert marker_of(tmp_path, "c").error is None
    assert "last states are wanted at" in str(marker_of(tmp_path, "d").error)
    assert not marker_of(tmp_path, "d").again
    writer.submit(save("late"), cache)  # after the end: nothing to be done, and still no exception


def test_a_sample_is_good_although_an_old_one_cannot_be_deleted(tmp_path: Path) -> None:
    class Stuck(FolderExchange):
        def remove(self, handle: str) -> None:
            raise PermissionError(f"{handle} is read-only")

    _, cache = paged(10, [5, 2, 9])
    writer = make(Stuck(tmp_path), lease=0.0)
    for handle in ("old", "new"):
        writer.submit(save(handle), cache)
    writer.finish()
    assert [marker_of(tmp_path, h).error for h in ("old", "new")] == [None, None]
    writer.close()


@pytest.mark.parametrize("refusals", [2, 99])
def test_a_marker_is_tried_again_whatever_went_wrong_with_it(
    tmp_path: Path, refusals: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writers, "_PAUSES", (0.01, 0.01, 0.01))

    class Odd(Broken):
        def fail(self, handle: str, error: str, *, again: bool) -> None:
            self.refusals -= 1
            if self.refusals >= 0:
                raise OSError("stale file handle")
            FolderExchange.fail(self, handle, error, again=again)

    exchange = Odd(tmp_path, RuntimeError("x"))
    exchange.refusals = refusals
    _, cache = paged(10, [5, 2, 9])
    writer = make(exchange)
    writer.submit(save(), cache)
    writer.finish()
    if refusals == 2:
        assert marker_of(tmp_path) == Marker(error="RuntimeError: x", again=True)
    else:
        assert exchange.refusals == 99 - 4, "tries are bounded"
        assert "cannot be said for good: stale file handle" in caplog.text


def test_the_end_of_a_server_deletes_what_nobody_fetches_and_waits_a_moment_for_those_who_do(tmp_path: Path) -> None:
    _, cache = paged(10, [5, 2, 9])
    writer, exchange = make(FolderExchange(tmp_path)), FolderExchange(tmp_path)
    for handle in ("fetched", "forgotten"):
        writer.submit(save(handle), cache)
    ending = threading.Thread(target=writer.close)
    ending.start()
    time.sleep(0.2)
    assert unpack(exchange.get("fetched"), "fetched"), "its client was told of it just before the end"
    exchange.remove("fetched")
    ending.join(20)
    assert not ending.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_the_forward_pass_waits_when_too_much_is_waiting_to_be_sent(tmp_path: Path) -> None:
    gate = threading.Event()

    class Slow(FolderExchange):
        def put(self, handle: str, data: bytes) -> None:
            gate.wait(10)
            super().put(handle, data)

    _, cache = paged(10, [5, 2, 9])
    writer = make(Slow(tmp_path), pending=1000)  # one sample has 10 * 2 * 8 * 4 + 6 * 8 * 4 = 832 bytes
    writer.submit(save("a"), cache)
    thread = threading.Thread(target=writer.submit, args=(save("b"), cache))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    gate.set()
    thread.join(10)
    assert not thread.is_alive()
    writer.finish()
    assert FolderExchange(tmp_path).look("b") == Marker(size=(tmp_path / "b.states").stat().st_size)


def test_a_damaged_sample_is_refused_by_name(tmp_path: Path) -> None:
    _, cache = paged(10, [5, 2, 9])
    writer, exchange = make(FolderExchange(tmp_path)), FolderExchange(tmp_path)
    writer.submit(save("h", codec="fp8"), cache)
    writer.finish()
    whole = exchange.get("h")
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(HiddenStateError, match="sample h "):
            unpack(bytes(damaged), "h")
    with pytest.raises(HiddenStateError, match="holds the states of h"):
        unpack(whole, "other")
