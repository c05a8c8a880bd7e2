"""Compiling and loading C: a real library, a broken source, no compiler."""

from __future__ import annotations

import warnings

import pytest

from firesteel.kernels import native

ADD = "int add(int a, int b) { return a + b; }"


@pytest.fixture(autouse=True)
def _fresh():
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
def test_a_library_is_built_once_and_answers():
    library = native.load(ADD)
    assert library is not None
    assert library.add(2, 3) == 5
    assert native.load(ADD) is library


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
def test_what_does_not_compile_warns_with_the_compilers_words_and_gives_none():
    with pytest.warns(UserWarning, match="could not build the loss kernels"):
        assert native.load("this is not C") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load("this is not C") is None  # one warning is enough


def test_no_compiler_warns_once(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert native.compiler() is None
    with pytest.warns(UserWarning, match="no C compiler"):
        assert native.load(ADD) is None


def test_cc_is_obeyed(monkeypatch, tmp_path):
    mine = tmp_path / "mycc"
    mine.write_text("#!/bin/sh\nexit 1\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CC", f"{mine} -DX")
    assert native.compiler() == [str(mine), "-DX"]
