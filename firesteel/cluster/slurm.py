"""A batch script for Slurm: one allocation of all nodes, a step a process, the trainers' exit code as its own."""

from __future__ import annotations

from collections.abc import Sequence

from firesteel.cluster.process import Process, quote, variable
from firesteel.cluster.topology import CPU, Topology
from firesteel.endpoints.roster import FILE as ENDPOINTS
from firesteel.endpoints.roster import HEAD
from firesteel.errors import RecipeError
from firesteel.recipe import Recipe

_HEAD = """\
set -euo pipefail

mapfile -t HOSTS < <(scontrol show hostnames "${SLURM_JOB_NODELIST}")
"""
_BODY = """\
LOGS=@LOGS@
mkdir -p "${LOGS}"
declare -A PIDS

# start NAME HOST COMMAND...: a step of the job on that host, in the background; it has all of the job's accelerators and processors there
start() {
  local name=$1 host=$2
  shift 2
  srun --overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist="${host}" --output="${LOGS}/${name}.log" env "$@" &
  PIDS["${name}"]=$!
}

# ready NAME URL SECONDS: wait until a server answers
ready() {
  local name=$1 url=$2 until=$((SECONDS + $3))
  until curl --noproxy '*' --silent --fail --max-time 2 --output /dev/null "${url}"; do
    if ! kill -0 "${PIDS[${name}]}" 2> /dev/null; then
      echo "${name} has ended: see ${LOGS}/${name}.log" >&2
      exit 1
    fi
    if ((SECONDS > until)); then
      echo "${name} gave no sign of life: see ${LOGS}/${name}.log" >&2
      exit 1
    fi
    sleep 2
  done
  echo "${name} is ready"
}

# shellcheck disable=SC2317,SC2329 # called by the trap
finish() {
  kill "${PIDS[@]}" 2> /dev/null || true
  wait || true
}
trap finish EXIT
"""


def batch_script(recipe: Recipe, topology: Topology, processes: Sequence[Process]) -> str:
    """The script, to be given to `sbatch`.

    Args:
        topology: with unknown addresses (`process.unknown_address`), which become those of the hosts that Slurm gives.

    Raises:
        RecipeError: nodes differ, which one allocation cannot have.
    """
    c, nodes = recipe.cluster, topology.nodes
    kinds = sorted({(n.kind, n.accelerators) for n in nodes})
    if len(kinds) > 1:
        raise RecipeError(
            f"Slurm gives one kind of node, cluster.nodes has {len(kinds)}: {', '.join(f'{n} x {k}' for k, n in kinds)}",
            mend="use the same kind and number of accelerators, or --on ssh inside an allocation of your own",
        )
    logs = str((recipe.run_dir / "launch" / "logs").absolute())
    options = {"job-name": f"firesteel-{recipe.name}", "nodes": len(nodes), "ntasks-per-node": 1, "time": c.slurm.time, "output": f"{recipe.name}-%j.out"}
    options |= {k: v for k, v in (("partition", c.slurm.partition), ("account", c.slurm.account)) if v is not None}
    gpus = c.slurm.gpus and nodes[0].kind != CPU
    if gpus:
        options["gpus-per-node"] = nodes[0].accelerators
    lines = ["#!/bin/bash", *(f"#SBATCH --{k}={v}" for k, v in options.items()), "#SBATCH --exclusive", "#SBATCH --mem=0", _HEAD]
    lines += [f'{variable(n.name)}="${{HOSTS[{i}]}}"' for i, n in enumerate(nodes)]
    lines.append(_BODY.replace("@LOGS@", quote(logs)))
    for role in ("master", "server"):
        lines += [_start(p) for p in processes if p.role == role]
    lines += [f"ready {p.name} {quote(p.health)} {round(recipe.target.vllm.start_timeout)}" for p in processes if p.health is not None]
    lines += ["", *_endpoints(recipe, topology)]
    trainers = [p for p in processes if p.role == "trainer"]
    lines += ["", *(_start(p) for p in trainers), "", "code=0"]
    lines += [f'wait "${{PIDS[{p.name}]}}" || code=$?' for p in trainers]
    return "\n".join([*lines, "exit ${code}", ""])


def _start(process: Process) -> str:
    words = [f"{k}={quote(v)}" for k, v in process.env.items()] + [quote(w) for w in process.argv]
    return f'start {process.name} "${{{variable(process.node.name)}}}" {" ".join(words)}'


def _endpoints(recipe: Recipe, topology: Topology) -> list[str]:
    """Replace the run's list of servers: what is in it counts, and those of an earlier job were on other hosts."""
    file = str((recipe.run_dir / ENDPOINTS).absolute())
    new = quote(f"{file}.new")
    urls = " ".join(quote(s.url) for s in topology.servers)
    return [
        "# shellcheck disable=SC2016 # words, not a command",
        f"printf '%s\\n' {quote(HEAD.rstrip())} {urls} > {new}",
        f"mv -f {new} {quote(file)}",
    ]
