"""The stores: whole files or none, damage is found, disk and memory agree."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from firesteel.errors import HiddenStateError, ResourceError
from firesteel.hidden.codec import CodecName
from firesteel.hidden.sample import HiddenSample, predictable_positions
from firesteel.hidden.stores import DiskStore, HiddenStore, MemoryStore, predict_bytes

CODECS: tuple[CodecName, ...] = ("bf16", "fp32", "fp8")
FIELDS = ("token_ids", "loss_mask", "aux", "last", "last_positions", "last_lognorm")


def sample_of(key: str, t: int = 7, m: int = 2, d: int = 4, seed: int = 0) -> HiddenSample:
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(t) >= 2
    positions = predictable_positions(mask)
    return HiddenSample(
        key=key,
        token_ids=torch.randint(0, 50, (t,), generator=g),
        loss_mask=mask,
        aux=torch.randn(t, m, d, generator=g),
        last=torch.randn(len(positions), d, generator=g),
        last_positions=positions,
        layer_ids=tuple(range(m)),
        target="some-target",
        last_lognorm=torch.randn(len(positions), generator=g),
    )


def same(a: HiddenSample, b: HiddenSample) -> bool:
    facts = (a.key, a.layer_ids, a.target) == (b.key, b.layer_ids, b.target)
    return facts and all(torch.equal(getattr(a, f), getattr(b, f)) and getattr(a, f).dtype == getattr(b, f).dtype for f in FIELDS)


@pytest.mark.parametrize("codec", CODECS)
def test_disk_and_memory_give_the_same_numbers(tmp_path: Path, codec: CodecName) -> None:
    disk, memory = DiskStore(tmp_path / "deep" / "er", codec), MemoryStore(codec)
    stores: list[HiddenStore] = [disk, memory]
    assert all(s.keys() == [] and s.nbytes() == 0 and "b" not in s for s in stores)
    for i, key in enumerate(["b", "c-1", "a.x"]):
        for store in stores:
            store.put(sample_of(key, t=7 + i, seed=i))
    assert disk.keys() == memory.keys() == ["a.x", "b", "c-1"]
    assert DiskStore(disk.folder, codec).keys() == disk.keys(), "a store that is opened again names the same keys"
    for key in ("a.x", "b", "c-1"):
        assert key in disk
        assert key in memory
        assert same(disk.get(key), memory.get(key))
    if codec == "fp32":
        assert same(disk.get("b"), sample_of("b"))
    assert 0 < memory.nbytes() < disk.nbytes() == sum(p.stat().st_size for p in disk.folder.iterdir())


def test_put_replaces_and_memory_keeps_a_copy(tmp_path: Path) -> None:
    for store in (DiskStore(tmp_path, "fp32"), MemoryStore("fp32")):
        store.put(sample_of("a", seed=1))
        second = sample_of("a", seed=2)
        store.put(second)
        second.aux += 1
        assert store.keys() == ["a"]
        assert same(store.get("a"), sample_of("a", seed=2))


def test_memory_does_not_keep_the_forward_pass_that_a_sample_was_cut_from() -> None:
    store, whole = MemoryStore("fp32"), sample_of("a", t=64)
    for name in FIELDS:
        setattr(whole, name, getattr(whole, name)[:8])
    store.put(whole)
    assert store.get("a").aux.untyped_storage().nbytes() == 8 * 2 * 4 * 4


def test_what_is_not_there_and_what_cannot_be_a_name(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, "bf16")
    for store in (disk, MemoryStore("bf16")):
        with pytest.raises(HiddenStateError, match="no hidden states of document nobody"):
            store.get("nobody")
    for key in ("../a", "", ".a", "a/b", "a\n"):
        with pytest.raises(HiddenStateError, match="cannot name a file"):
            disk.put(sample_of(key))
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_in_any_byte_of_the_file_is_found_and_the_file_named(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, "fp8")  # the codec with the most tensors
    store.put(sample_of("doc", t=5))
    path = tmp_path / "doc.safetensors"
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        with pytest.raises(HiddenStateError, match=r"doc\.safetensors"):
            store.get("doc")
    path.write_bytes(whole)
    assert store.get("doc").key == "doc"


def test_a_short_an_empty_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, "bf16")
    store.put(sample_of("doc"))
    path = tmp_path / "doc.safetensors"
    whole = path.read_bytes()
    for length in (0, 7, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(HiddenStateError, match=r"doc\.safetensors is corrupt"):
            store.get("doc")
    path.write_bytes(whole)
    path.rename(tmp_path / "other.safetensors")
    with pytest.raises(HiddenStateError, match=r"other\.safetensors holds the states of document doc"):
        store.get("other")


def test_the_header_says_what_the_file_is(tmp_path: Path) -> None:
    DiskStore(tmp_path, "fp8").put(sample_of("doc"))
    with safe_open(tmp_path / "doc.safetensors", framework="pt") as file:
        header = file.metadata()
    assert re.fullmatch("crc32:[0-9a-f]{8}", header.pop("checksum"))
    assert header == {"format_version": "1", "key": "doc", "codec": "fp8", "layer_ids": "[0, 1]", "target": "some-target"}


def test_killed_between_writing_and_renaming(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, "fp32")
    store.put(sample_of("old", seed=1))
    for key in ("old", "new"):
        sample = sample_of(key, seed=2)
        child = os.fork()
        if child == 0:
            try:
                Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
                store.put(sample)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3, "the writers died after the temporary files were written"
    again = DiskStore(tmp_path, "fp32")
    assert again.keys() == ["old"]
    assert "new" not in again
    assert again.nbytes() == (tmp_path / "old.safetensors").stat().st_size
    assert same(again.get("old"), sample_of("old", seed=1)), "the old version is untouched"
    again.put(sample_of("new", seed=2))
    assert same(again.get("new"), sample_of("new", seed=2))
    assert again.sweep() == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.safetensors", "old.safetensors"]


def test_a_full_disk_is_a_resource_error_and_leaves_nothing_half(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, "fp32")
    store.put(sample_of("small"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ResourceError, match=r"cannot write .*big\.safetensors"):
            store.put(sample_of("big", t=5000, d=16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["small.safetensors"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write"):
        DiskStore(tmp_path / "file" / "below", "fp32").put(sample_of("a"))


@pytest.mark.parametrize("codec", CODECS)
def test_the_prediction_is_what_the_disk_takes(tmp_path: Path, codec: CodecName) -> None:
    store, tokens, supervised = DiskStore(tmp_path, codec), 0, 0
    for i in range(4):
        sample = sample_of(f"{i:064x}", t=100 + 37 * i, m=5, d=64, seed=i)
        sample.target = "f" * 64
        store.put(sample)
        tokens, supervised = tokens + len(sample), supervised + len(sample.last)
    predicted = predict_bytes(tokens, supervised, 5, 64, codec, documents=4)
    assert store.nbytes() <= predicted <= 1.02 * store.nbytes()
