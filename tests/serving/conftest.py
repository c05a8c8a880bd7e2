from __future__ import annotations

import sys
from pathlib import Path

for room in ("serving", "decoding", "line", "package"):
    sys.path.insert(0, str(Path(__file__).parent.parent / room))
