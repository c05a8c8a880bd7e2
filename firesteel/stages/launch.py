"""`firesteel launch`: every process of a run on the machines of `cluster`, printed, started here, over ssh, or written down for Slurm or Kubernetes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from firesteel.artifact import write_atomic
from firesteel.cluster.hands import Hands, Local, Ssh, work_folder
from firesteel.cluster.kubernetes import address_of, manifests, trainer_address
from firesteel.cluster.probe import check_versions
from firesteel.cluster.process import Process, blocks, check_startable, unknown_address
from firesteel.cluster.running import Running
from firesteel.cluster.scrape import scrape_config
from firesteel.cluster.slurm import batch_script
from firesteel.cluster.topology import CPU, LOOPBACK, ServerSpot, Topology, TrainerSpot, make_topology, trainer_ports
from firesteel.endpoints.roster import FILE as ENDPOINTS
from firesteel.endpoints.roster import write_urls
from firesteel.errors import RecipeError
from firesteel.recipe import Node, Recipe, recipe_to_yaml
from firesteel.stages.line import Line, pick_layer_ids
from firesteel.stages.plan import plan_of, table
from firesteel.stages.sizes import target_shape
from firesteel.stages.underway import check_room
from firesteel.target.layout import Layout, read_layout
from firesteel.target.server import ServerPlan, leave_on_signals, link_code, plan_server

FOLDER, RECIPE, SCRIPT, MANIFESTS, SCRAPE = "launch", "recipe.yaml", "job.sbatch", "kubernetes.yaml", "prometheus.yml"
_WRITERS = {"slurm": batch_script, "kubernetes": manifests}


def run(line: Line, launcher: str | None, *, dry_run: bool) -> int:
    """Check the cluster and bring the run onto it; returns the trainers' exit code.

    Args:
        launcher: `local`, `ssh`, `slurm` or `kubernetes`; None: `cluster.launcher`.
        dry_run: only print every command (or the script, or the manifests).

    Raises:
        FiresteelError: the cluster does not fit, a node cannot be reached or differs, or a process fails before training begins.
    """
    say, how = line.screen.say, launcher or line.recipe.cluster.launcher
    recipe = rooted(line.recipe, how)
    placed, there = _addressed(recipe, how)
    plan_of(placed, table(recipe), simulate=0.0)
    if dry_run:
        sys.stdout.write(written_for(recipe, how) if how in _WRITERS else "\n".join(blocks(there, make_processes(placed, there, how))))
        return 0
    check_startable(there, recipe.cluster.verb)
    _check_shared(recipe, there, how)
    link_code(line.folder)
    file = write_recipe(recipe)
    if how != "slurm":  # which chooses the machines later
        write_atomic(line.folder / FOLDER / SCRAPE, scrape_config(placed, there, lambda node: _trainer_at(placed, node, how)))
    if how == "kubernetes":
        _list_servers(line, there)
    if how in _WRITERS:
        out = line.folder / FOLDER / (SCRIPT if how == "slurm" else MANIFESTS)
        write_atomic(out, written_for(recipe, how))
        say(f"launch: recipe in {file}; start with `{'sbatch' if how == 'slurm' else 'kubectl apply -f'} {out}`")
        return 0
    hands: Hands = Local(recipe.cluster) if how == "local" else Ssh(recipe.cluster, _python(recipe, how), work_folder(recipe.cluster))
    check_versions(hands, _asked(recipe, there, how))
    _list_servers(line, there)
    leave_on_signals()
    processes = make_processes(placed, there, how)
    logs = line.folder / FOLDER / "logs"
    say(f"launch: {len(processes)} processes on {len(there.nodes)} node(s); their logs are in {logs}")
    with Running(processes, hands, logs, recipe.target.vllm.start_timeout, say, recipe.cluster.restarts) as running:
        return running.run()


def written_for(recipe: Recipe, launcher: str) -> str:
    """The Slurm script or the Kubernetes manifests of a recipe.

    Raises:
        RecipeError: that system cannot have such a cluster.
    """
    placed, there = _addressed(rooted(recipe, launcher), launcher)
    return _WRITERS[launcher](placed, there, make_processes(placed, there, launcher))


def make_processes(recipe: Recipe, topology: Topology, launcher: str) -> list[Process]:
    """Every process, in the order in which they are started: master, servers, trainers.

    Raises:
        RecipeError, TargetError: of the kind that a server's command meets.
    """
    layout, found = _layout(recipe), []
    for spot in topology.servers:
        found += [_server(recipe, topology, spot, rank, layout, launcher) for rank in range(len(spot.nodes))]
    if topology.master is not None:
        plan = _plan(recipe, topology, topology.servers[0], topology.master, layout, launcher, own_master=True)
        found.insert(0, Process("master", "master", topology.master, tuple(plan.master), recipe.cluster.env.master, ports=plan.master_ports))
    trainers = topology.trainers
    if recipe.cluster.verb == "extract":  # one process lists the documents and checks the states of a few
        trainers = (replace(trainers[0], processes=1),)
    return [*found, *(_trainer(recipe, replace(topology, trainers=trainers), spot, launcher) for spot in trainers)]


def write_recipe(recipe: Recipe) -> Path:
    """The resolved recipe, where the trainers read it."""
    path = recipe.run_dir / FOLDER / RECIPE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, recipe_to_yaml(recipe))
    return path


def rooted(recipe: Recipe, launcher: str) -> Recipe:
    """The recipe for processes that may start in another folder: relative paths of what is here are written in full.

    Slurm starts them where `sbatch` is typed, Kubernetes where the image says: there only the run's folder and the exchange are taken from here. Artifacts
    are known by some of the paths, so these stay as they are where `ssh` starts in this very folder: stages made here and there count as equal.
    """
    if launcher == "local":
        return recipe
    exchange = None if recipe.hidden.exchange is None else str(Path(recipe.hidden.exchange).expanduser().absolute())
    hidden = recipe.hidden.model_copy(update={"exchange": exchange})
    recipe = recipe.model_copy(update={"runs_dir": str(Path(recipe.runs_dir).absolute()), "hidden": hidden})
    if launcher != "ssh":
        return recipe
    c, t = recipe.cluster, recipe.target
    t = t.model_copy(update={"vllm": t.vllm.model_copy(update={"python": _full_program(t.vllm.python)})})
    recipe = recipe.model_copy(update={"target": t, "cluster": c.model_copy(update={"python": _full_program(c.python)})})
    if work_folder(c) == str(Path.cwd()):
        return recipe
    sources = [s.model_copy(update={"path": _full(s.path), "dataset": _full(s.dataset)}) for s in recipe.prompts.sources]
    extra = [e.model_copy(update={"path": _full(e.path)}) for e in recipe.evaluate.extra]
    checkpoints = {name: _full(folder) for name, folder in recipe.evaluate.checkpoints.items()}
    init = recipe.drafter.init
    return recipe.model_copy(
        update={
            "target": t.model_copy(update={"model": _full(t.model), "chat_template": _full(t.chat_template)}),
            "prompts": recipe.prompts.model_copy(update={"sources": sources}),
            "responses": recipe.responses.model_copy(update={"answers": _full(recipe.responses.answers)}),
            "evaluate": recipe.evaluate.model_copy(update={"extra": extra, "checkpoints": checkpoints}),
            "drafter": recipe.drafter.model_copy(update={"init": init if init in ("random", "target") else _full(init)}),
        }
    )


def _full(name: str | None) -> str | None:
    """A relative path of something that is here, in full; any other name as it is."""
    return str(Path(name).absolute()) if name and Path(name).exists() else name


def _full_program(name: str | None) -> str | None:
    """The same of a program; a bare name is looked for on the PATH."""
    return _full(name) if name is not None and "/" in name else name


def _list_servers(line: Line, topology: Topology) -> None:
    """The servers of this launch in the run's list, which counts where it is there; those of an earlier launch are not up."""
    write_urls(line.folder / ENDPOINTS, [s.url for s in topology.servers])


def _layout(recipe: Recipe) -> Layout:
    """From the target's config, or for a target that is elsewhere from public figures."""
    if recipe.target.model.startswith("pypi:") or Path(recipe.target.model).is_dir():
        return read_layout(recipe.target)
    shape = target_shape(recipe)
    return Layout(recipe.target.model, shape.layers, shape.max_positions, shape.hidden)


def _plan(recipe: Recipe, topology: Topology, spot: ServerSpot, node: Node, layout: Layout, launcher: str, *, own_master: bool = False) -> ServerPlan:
    """The same command as `firesteel extract-server` runs, for one node of a server."""
    v, m, local = recipe.target.vllm, recipe.hidden.mooncake, launcher == "local"
    vllm = v.model_copy(
        update={
            "python": v.python if local else None,
            "host": spot.nodes[0].address if spot.nodes[0].address.startswith(LOOPBACK) else "0.0.0.0",
            "port": spot.port,
            "tensor_parallel": spot.accelerators,
        }
    )
    target = recipe.target.model_copy(update={"vllm": vllm, "endpoints": [], "device": "cpu" if node.kind == CPU else "cuda"})
    mooncake = m.model_copy(update={"address": node.address, "master": None if own_master else _master(recipe, topology)})
    hidden = recipe.hidden.model_copy(update={"mooncake": mooncake, "exchange": _exchange(recipe)})
    ids = pick_layer_ids(recipe, layout.num_layers)
    check_room(hidden, len(ids), layout.hidden_size)
    made = plan_server(
        target, hidden, recipe.run_dir, model=layout.path, layer_ids=ids, num_layers=layout.num_layers, max_positions=layout.max_positions, link=False
    )
    if local:
        return made
    # Paths of this machine mean nothing there.
    python = v.python or _python(recipe, launcher)
    master = [str(Path(python).with_name("mooncake_master")) if "/" in python else "mooncake_master", *made.master[1:]] if made.master else []
    return ServerPlan([python, *made.command[1:]], made.env if launcher != "kubernetes" else _without(made.env, "PYTHONPATH"), made.url, master)


def _server(recipe: Recipe, topology: Topology, spot: ServerSpot, rank: int, layout: Layout, launcher: str) -> Process:
    node, parts = spot.nodes[rank], len(spot.nodes)
    made = _plan(recipe, topology, spot, node, layout, launcher)
    argv = list(made.command)
    if parts > 1:
        argv += ["--nnodes", str(parts), "--node-rank", str(rank), "--master-addr", spot.nodes[0].address, "--master-port", str(spot.rendezvous)]
        argv += ["--headless"] if rank else []
    env = made.env | _devices(topology, node, spot.first, spot.accelerators // parts, launcher)
    name = spot.name if parts == 1 else f"{spot.name}-part{rank}"
    ports = (spot.port, *((spot.rendezvous,) if spot.rendezvous else ())) if rank == 0 else ()
    health = f"{spot.url}/health" if rank == 0 else None
    return Process(name, "server", node, tuple(argv), env | recipe.cluster.env.inference, health, spot.accelerators // parts, ports)


def _trainer(recipe: Recipe, topology: Topology, spot: TrainerSpot, launcher: str) -> Process:
    """`firesteel run` (or `train`) with this cluster's servers; under torchrun where there is more than one process."""
    c, python = recipe.cluster, _python(recipe, launcher)
    argv = [python]
    own, first = (_trainer_at(recipe, n, launcher) for n in (spot.node, topology.trainers[0].node))
    if topology.world_size > 1:
        argv += ["-m", "torch.distributed.run", "--nnodes", str(len(topology.trainers)), "--nproc-per-node", str(spot.processes)]
        argv += ["--node-rank", str(spot.rank), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{c.rendezvous_port}"]
        # Said outright: torchrun would go by what a machine's name resolves to, which need not be the address that others reach.
        argv += ["--rdzv-conf", f"is_host={int(spot.rank == 0)}", "--local-addr", own]
        argv += ["--rdzv-id", recipe.name, "--max-restarts", str(c.max_restarts)]
    argv += ["-m", "firesteel.cli.app", c.verb, str((recipe.run_dir / FOLDER / RECIPE).absolute()), "target.engine=vllm"]
    argv.append(f"target.endpoints=[{','.join(s.url for s in topology.servers)}]")
    if recipe.hidden.transport == "mooncake":
        argv += [f"hidden.mooncake.master={_master(recipe, topology)}", f"hidden.mooncake.address={own}"]
    elif (exchange := _exchange(recipe)) is not None:
        argv.append(f"hidden.exchange={exchange}")
    if recipe.watch.metrics_port is not None:  # seen from other machines
        argv.append(f"watch.metrics_host={own if own.startswith(LOOPBACK) else '0.0.0.0'}")
    ports = (*((c.rendezvous_port,) if topology.world_size > 1 and spot.rank == 0 else ()), *trainer_ports(recipe, spot.processes))
    env = _devices(topology, spot.node, 0, spot.node.accelerators, launcher)  # of which each process takes the one of its LOCAL_RANK
    # Restarts are counted by each machine's agent; without this they would wait for each other in a store that lives on.
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if len(topology.trainers) > 1 and c.max_restarts else {}
    return Process(spot.name, "trainer", spot.node, tuple(argv), env | c.env.training, None, 0 if spot.node.kind == CPU else spot.processes, ports)


def _devices(topology: Topology, node: Node, first: int, count: int, launcher: str) -> dict[str, str]:
    """Environment of a process that has only some of its machine's accelerators; a pod of Kubernetes has its own."""
    found = None if launcher == "kubernetes" else topology.devices(node, first, count)
    return {} if found is None else {"CUDA_VISIBLE_DEVICES": found}


def _trainer_at(recipe: Recipe, node: Node, launcher: str) -> str:
    return trainer_address(recipe, node) if launcher == "kubernetes" else node.address


def _master(recipe: Recipe, topology: Topology) -> str | None:
    if topology.master is None:
        return recipe.hidden.mooncake.master
    return f"{topology.master.address}:{recipe.hidden.mooncake.port}"


def _exchange(recipe: Recipe) -> str | None:
    if recipe.hidden.exchange is None and recipe.cluster.shared is not None and recipe.hidden.transport == "disk":
        return str(Path(recipe.cluster.shared) / "exchange" / recipe.name)
    return recipe.hidden.exchange


def _python(recipe: Recipe, launcher: str) -> str:
    return recipe.cluster.python or ("python" if launcher == "kubernetes" else sys.executable)


def _addressed(recipe: Recipe, launcher: str) -> tuple[Recipe, Topology]:
    """Recipe and topology for this launcher, with the addresses that hold there: Slurm and Kubernetes choose machines themselves.

    Raises:
        RecipeError: of `make_topology`.
    """
    cluster = recipe.cluster.model_copy(update={"launcher": launcher})
    if launcher in _WRITERS:
        address = (lambda n: unknown_address(n.name)) if launcher == "slurm" else (lambda n: address_of(recipe, n))
        cluster.nodes = [n.model_copy(update={"address": address(n)}) for n in make_topology(recipe).nodes]
    placed = recipe.model_copy(update={"cluster": cluster})
    return placed, make_topology(placed)


def _asked(recipe: Recipe, topology: Topology, launcher: str) -> list[tuple[str, Node, str]]:
    own = _python(recipe, launcher)
    servers = [("inference", node, recipe.target.vllm.python or own) for s in topology.servers for node in s.nodes]
    asked = [*servers, *(("training", t.node, own) for t in topology.trainers)]
    return list({(role, node.name): (role, node, python) for role, node, python in asked}.values())  # each node once a role


def _check_shared(recipe: Recipe, topology: Topology, launcher: str) -> None:
    """Trainers elsewhere must find the recipe and the run.

    Raises:
        RecipeError: the run's folder is this machine's own, or pods would each have one.
    """
    if launcher == "local" or all(n.address.startswith(LOOPBACK) for n in topology.nodes):
        return
    shared = recipe.cluster.shared
    if shared is None:
        raise RecipeError("the nodes need a folder that all of them see, for the recipe and the run", mend="set cluster.shared, and runs_dir to a folder in it")
    if not recipe.run_dir.absolute().is_relative_to(Path(shared).absolute()):
        raise RecipeError(f"runs_dir={recipe.runs_dir} is not in cluster.shared={shared}: nodes would not find the run", mend=f"set runs_dir={shared}/runs")
    if launcher == "kubernetes" and recipe.cluster.kubernetes.claim is None:
        raise RecipeError(
            f"cluster.kubernetes.claim is empty: nothing would be mounted at cluster.shared={shared}, and each pod would have a run of its own",
            mend="set cluster.kubernetes.claim to a PersistentVolumeClaim that many nodes can write (ReadWriteMany)",
        )


def _without(env: dict[str, str], name: str) -> dict[str, str]:
    return {k: v for k, v in env.items() if k != name}
