#!/usr/bin/env bash
# Builds .venv-peers: an environment of the peers' own, so that neither their packages nor ours decide the other's versions.
# Running it again repairs or does nothing. PYTHON and VENV may be set.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
venv=${VENV:-.venv-peers}
stamp="$venv/.built"
want=$(cat constraints.txt benchmarks/peers/requirements.txt benchmarks/peers/build.sh | sha256sum)

check() {
  "$venv/bin/python" - <<'PY'
from importlib.metadata import version
from speculators.models.dspark import DSparkDraftModel
from speculators.models.dflash import DFlashDraftModel

print(f"peers: speculators {version('speculators')}, torch {version('torch')}, transformers {version('transformers')}: {DSparkDraftModel.__name__}, {DFlashDraftModel.__name__}")
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
"${install[@]}" --constraint constraints.txt --requirement benchmarks/peers/requirements.txt
"${install[@]}" --no-deps speculators==0.9.0 hs-connectors==0.9.0
check
printf '%s\n' "$want" > "$stamp"
