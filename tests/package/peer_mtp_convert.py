"""Runs in the peers' environment: speculators' own converter takes the MTP head out of a model's folder, and opens what it wrote.

Usage: python peer_mtp_convert.py STEPS MODEL OUT [MODEL OUT]...
"""

from __future__ import annotations

import sys

import torch
from speculators.convert.mtp import MTPConverter

if __name__ == "__main__":
    torch.set_num_threads(1)
    steps, *folders = sys.argv[1:]
    for model, out in zip(folders[::2], folders[1::2], strict=True):
        MTPConverter().convert(model, out, base_model=model, num_speculative_steps=int(steps), validate=True)
