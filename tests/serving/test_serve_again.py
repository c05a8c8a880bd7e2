"""`firesteel serve` of an MTP head, again and again: the copy of the target with the head in it is kept, and made anew for another head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mtp_package
import pytest
import torch
from line_screen import QuietScreen
from mtp_package import export_head, save_target
from safetensors.torch import load_file
from server_toys import reusing
from tiny_target import save_tiny_target
from vllm_fake import behave, install_fake

from firesteel.drafters.mtp_format import native_tensor
from firesteel.package.load import load
from firesteel.recipe import recipe_from_dict
from firesteel.stages import serve
from firesteel.stages.line import Line


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A Qwen3.5 with the tokenizer of the tiny chat model."""
    save_tiny_target(tmp_path / "target", vocab=40)
    return save_target(tmp_path / "target")


@pytest.fixture
def heads(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two heads for it, as a user has them in two folders."""
    first = export_head(tmp_path / "first", target)
    real = mtp_package.head_tensors
    with monkeypatch.context() as patch:
        patch.setattr(mtp_package, "head_tensors", lambda config, seed=1: real(config, seed + 5))
        return first, export_head(tmp_path / "second", target)


@pytest.fixture
def line(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Line]:
    monkeypatch.setenv("FAKE_VLLM", "{}")

    def make(package: Path) -> Line:
        with reusing() as free:
            free.bind(("127.0.0.1", 0))
            own = {"python": str(install_fake(tmp_path)), "port": free.getsockname()[1], "start_timeout": 20}
        sections = {"target": {"model": str(target), "threads": 1}, "serve": own, "runs_dir": str(tmp_path / "runs")}
        return Line(recipe_from_dict({**serve.recipe_settings(package), **sections}), QuietScreen())

    return make


def check(line: Line, package: Path) -> Path:
    """Serve a folder, and look whether its head was served."""
    behave(drafts=10, accepted=5)
    serve.run(line, package, dry_run=False, smoke=True)
    copy = line.folder / "serve" / "model"
    assert f"loading {copy}" in (line.folder / "serve" / "server.log").read_text()
    state, served = load(package).tensors, load_file(copy / "model.safetensors")
    heads = [n for n in served if n.startswith("mtp.")]
    assert heads
    for name in heads:
        found = native_tensor(name, state)
        assert found is not None
        assert torch.equal(served[name], found[1].to(served[name].dtype)), name
    return copy


def test_the_copy_is_kept_for_the_same_head_and_made_anew_for_another(line: Callable[[Path], Line], heads: tuple[Path, Path]) -> None:
    first, second = heads
    copy = check(line(first), first)
    (copy / "mark").write_text("still the same copy")
    check(line(first), first)
    assert (copy / "mark").is_file()
    check(line(second), second)
    assert not (copy / "mark").exists()
    (copy / "mark").write_text("of the second")
    check(line(first), first)
    assert not (copy / "mark").exists()


def test_a_copy_of_which_nobody_knows_what_is_in_it_is_made_anew(line: Callable[[Path], Line], heads: tuple[Path, Path]) -> None:
    first, _ = heads
    copy = check(line(first), first)
    (copy / "mark").write_text("of an interrupted run")
    (copy.parent / "model.json").unlink()
    check(line(first), first)
    assert not (copy / "mark").exists()


def test_the_command_names_the_copy_by_the_drafter_in_the_folder(
    line: Callable[[Path], Line], heads: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    served = line(heads[0])
    assert served.recipe.drafter.algorithm != "mtp"
    serve.run(served, heads[0], dry_run=True, smoke=False)
    assert f"vllm serve {served.folder / 'serve' / 'model'} " in capsys.readouterr().out
