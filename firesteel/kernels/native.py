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
