"""Small C kernels, compiled when first wanted with whatever C compiler the machine has: one second, no headers, no cache.

They are built anew by each process, for its own processor, in a folder that is gone when they are loaded; so nothing stale and nothing
built for another machine is ever run.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

FLAGS = (
    ("-O3", "-march=native", "-fno-trapping-math", "-fopenmp"),
    ("-O3", "-mcpu=native", "-fno-trapping-math", "-fopenmp"),
    ("-O3", "-march=native", "-fno-trapping-math", "-fopenmp-simd"),
    ("-O3", "-fopenmp-simd"),
    ("-O3",),
)
"""Tried in order until one compiles and loads: compilers differ in what they know and in whether they ship OpenMP."""


EXP = r"""
/* e^x within 2 ulp for -87 <= x <= 88: x = n ln 2 + r, Taylor in r, 2^n by the exponent bits; written so that compilers vectorise it */
static inline float e(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  union { int i; float f; } two;
  two.i = ((int)n + 127) << 23;
  return p * two.f;
}
"""
"""C source of an exponential, for kernels to begin with."""


def compiler() -> list[str] | None:
    """Command of the C compiler: `$CC`, else the first of cc, gcc, clang on the path; None where there is none."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in ([named] if named else []) + [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    return None


@functools.cache
def load(source: str) -> ctypes.CDLL | None:
    """Compile C `source` to a shared library and load it; None, with one warning, where that is not possible."""
    command = compiler()
    if command is None:
        warnings.warn("no C compiler found (cc, gcc, clang or $CC): the loss runs uncompiled, somewhat slower", stacklevel=2)
        return None
    message = ""
    with tempfile.TemporaryDirectory(prefix="firesteel-") as folder:
        code = Path(folder) / "kernel.c"
        code.write_text(source)
        for i, flags in enumerate(FLAGS):
            library = Path(folder) / f"kernel{i}.so"
            try:
                subprocess.run(
                    [*command, *flags, "-shared", "-fPIC", "-std=gnu11", str(code), "-o", str(library), "-lm"],
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                return ctypes.CDLL(str(library))
            except subprocess.CalledProcessError as e:
                message = e.stderr.strip().splitlines()[0] if e.stderr.strip() else str(e)
            except (OSError, subprocess.TimeoutExpired) as e:
                message = str(e)
    warnings.warn(f"{command[0]} could not build the loss kernels ({message}): the loss runs uncompiled, somewhat slower", stacklevel=2)
    return None
