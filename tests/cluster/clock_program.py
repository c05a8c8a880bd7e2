"""Runs a program with a clock that is wrong: FAKE_CLOCK seconds are added to what Python takes for the time of day."""

from __future__ import annotations

import os
import runpy
import sys
import time

_real, _off = time.time, float(os.environ["FAKE_CLOCK"])
time.time = lambda: _real() + _off
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
