"""Verb `stitch`: a fine-tuned MTP head into a copy of its target."""

from __future__ import annotations

from pathlib import Path

from firesteel.package.stitch import stitch
from firesteel.stages.line import Screen


def stitch_once(screen: Screen, package: Path, target: Path, out: Path) -> None:
    """Write the copy and say how to serve it."""
    done = stitch(package, target, out)
    what = f"{done.replaced} tensors replaced" if done.replaced else f"{done.added} tensors added"
    screen.say(f"stitch: {out}: {what}, {done.bytes / 1e9:.2f} GB; every other tensor is the target's, bit for bit")
    screen.say(f"serve it: vllm serve {out} --speculative-config with the method and draft length that {package / 'README.md'} shows")
