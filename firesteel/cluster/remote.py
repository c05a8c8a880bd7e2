"""Runs a command on a node on behalf of `firesteel launch`: `python -m firesteel.cluster.remote JSON`. Its standard input is the leash.

When it closes, because the launcher stops, dies or is cut off, the command is ended with all its children. Imports nothing of Firesteel.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

_PATIENCE = 60.0  # seconds between a friendly signal and the last one


def main(text: str) -> int:
    """Start, wait, and end with the command's exit code (128 + signal if one ended it).

    Args:
        text: JSON with `argv`, `env`, `folder` (None: as it is) and `signal`, the name of the friendly one.
    """
    task = json.loads(text)
    try:
        process = subprocess.Popen(task["argv"], env={**os.environ, **task["env"]}, cwd=task["folder"], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as e:
        print(f"{task['argv'][0]} cannot be started: {e.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=_leash, args=(process, signal.Signals[task["signal"]]), daemon=True).start()
    code = process.wait()
    _kill(process.pid, signal.SIGKILL)  # children that outlived it
    return code if code >= 0 else 128 - code


def _leash(process: subprocess.Popen[bytes], friendly: signal.Signals) -> None:
    while os.read(0, 4096):
        pass
    _kill(process.pid, friendly)
    deadline = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    _kill(process.pid, signal.SIGKILL)


def _kill(group: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, how)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
