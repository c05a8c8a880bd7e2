"""Where the tests' vLLM is, and how it is run."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent


def vllm_interpreter() -> Path:
    """The Python of `.venv-vllm`, or the one that is named; it need not be there."""
    return Path(os.environ.get("FIRESTEEL_VLLM_PYTHON", HERE.parents[1] / ".venv-vllm" / "bin" / "python"))


def vllm_environment(*, second_runner: bool) -> dict[str, str]:
    """One thread, a small cache, nothing sent anywhere; the second model runner by way of the shim."""
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    own |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if second_runner:
        own |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(HERE / "shim")}
    return {**os.environ, **own}
