"""Lets vLLM 0.32's second model runner, which alone serves DSpark and DFlash2, run where there is no GPU. For tests only.

That runner's kernels are written in Triton, and Triton has no compiler for CPUs, but it has an interpreter: numpy, slow, exact.
With this folder on PYTHONPATH (and VLLM_USE_V2_MODEL_RUNNER=1) every process of a server prepares the interpreter just before
vLLM asks whether there is a Triton.
"""

from __future__ import annotations

import importlib.abc
import os
import sys

ASKS_FOR_TRITON = "vllm.triton_utils.importing"


class _Before(importlib.abc.MetaPathFinder):
    """Finds nothing itself; acts when a module is about to be looked for."""

    def find_spec(self, name, path, target=None):
        if name == ASKS_FOR_TRITON:
            _prepare_triton()


def _prepare_triton() -> None:
    import numpy as np
    import triton.backends
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    class Driver:
        """Says that it is there; the interpreter never calls it."""

        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=Driver)

    # The interpreter's loads and stores want masks of numpy's own booleans; products of comparisons come as integers.
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask):
        return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    builder.create_masked_load = lambda self, ptrs, mask, *rest: load(self, ptrs, boolean(mask), *rest)
    builder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(self, ptrs, value, boolean(mask), *rest)
    # Functions of a GPU's mathematics library.
    libdevice.log1p = lambda x: tl.log(1.0 + x)
    libdevice.expm1 = lambda x: tl.exp(x) - 1.0


if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.meta_path.insert(0, _Before())
