from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "line"))
sys.path.insert(0, str(Path(__file__).parent))

from cluster_fakes import install


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target's config and programs in the place of vLLM's and Firesteel's Pythons."""
    for name in ("FAKE_VERSIONS", "FAKE_DIES", "FAKE_DIES_LATER", "FAKE_HANGS", "FAKE_WORK", "FAKE_CODE", "FAKE_DOWN", "FAKE_OTHER", "FAKE_OTHER_HOST"):
        monkeypatch.delenv(name, raising=False)
    install(tmp_path)
    return tmp_path
