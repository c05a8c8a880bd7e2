"""What `firesteel launch` would start: commands by node, a Slurm script that shells and ShellCheck accept, manifests that Kubernetes' own schema accepts."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cluster_fakes import recipe, settings
from typer.testing import CliRunner

from firesteel.cli.app import app
from firesteel.cluster.process import Process, quote, unknown_address
from firesteel.cluster.topology import make_topology
from firesteel.endpoints.roster import write_urls
from firesteel.errors import RecipeError
from firesteel.recipe import Recipe, load_recipe, recipe_from_dict, recipe_to_yaml
from firesteel.stages.extract_server import plan as extract_server_plan
from firesteel.stages.launch import make_processes
from firesteel.stages.launch import written_for as written
from firesteel.stages.line import Line

RACK = "kimi-k3-rack"


def printed(*args: str) -> str:
    done = CliRunner().invoke(app, ["launch", *args, "--dry-run"])
    assert done.exit_code == 0, done.output
    return done.output


def accelerated(folder: Path, *addresses: str) -> Recipe:
    """Two nodes of four accelerators: one with two servers, one that trains."""
    nodes = [{"name": name, "address": address, "kind": "h100", "accelerators": 4} for name, address in zip("st", addresses, strict=True)]
    groups = [{"name": "g", "inference": ["s"], "training": ["t"], "tensor_parallel": 2}]
    return recipe(folder, cluster={"nodes": nodes, "groups": groups})


def flag(argv: tuple[str, ...], name: str) -> Any:
    text = argv[argv.index(name) + 1]
    return json.loads(text) if text.startswith("{") else text


def test_a_server_is_started_as_extract_server_starts_it(folder: Path) -> None:
    """The same command, but for the port, the address and the folder that `cluster` says."""
    made = recipe(folder)
    process = next(p for p in make_processes(made, make_topology(made), "local") if p.role == "server")
    made.target.vllm.port, made.target.vllm.host, made.target.device = made.cluster.groups[0].port, "127.0.0.1", "cpu"
    alone = extract_server_plan(Line(made, None))  # type: ignore[arg-type]
    assert list(process.argv) == alone.command
    assert process.env == alone.env
    assert process.health == f"{alone.url}/health"


def test_the_rack_has_a_block_for_every_node() -> None:
    blocks = {b.split()[2]: b for b in printed(RACK).strip().split("\n\n")}
    assert sorted(blocks) == [f"{g}{i}" for g in "abcd" for i in (1, 2, 3)]
    first, second = (shlex.split(blocks[n].splitlines()[-1]) for n in ("b1", "b2"))
    assert [first[first.index("--node-rank") + 1], second[second.index("--node-rank") + 1]] == ["0", "1"]
    assert "--headless" in second
    assert "--headless" not in first
    assert first[first.index("--master-addr") + 1] == second[second.index("--master-addr") + 1] == "10.0.0.4"
    mooncake = json.loads(first[first.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]["mooncake"]
    assert (mooncake["master"], mooncake["address"], mooncake["protocol"]) == ("10.0.0.3:50051", "10.0.0.4", "rdma")
    ids = json.loads(first[first.index("--speculative-config") + 1])["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [24, 48, 72, 88, 92, 93]
    trainer = shlex.split(blocks["c3"].splitlines()[-1])
    words = " ".join(trainer)
    assert "-m torch.distributed.run --nnodes 4 --nproc-per-node 4 --node-rank 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.3:29500" in words
    assert trainer[-4:] == [
        "target.engine=vllm",
        "target.endpoints=[http://10.0.0.1:8100,http://10.0.0.4:8100,http://10.0.0.7:8100,http://10.0.0.10:8100]",
        "hidden.mooncake.master=10.0.0.3:50051",
        "hidden.mooncake.address=10.0.0.9",
    ]
    assert sum("mooncake_master" in b for b in blocks.values()) == 1
    assert not Path("/shared/firesteel").exists(), "a dry run writes nothing"


def test_a_trainers_settings_are_a_recipe(folder: Path) -> None:
    made = recipe(folder, cluster={**settings(folder)["cluster"], "shared": "/mnt/all"})
    trainer = next(p for p in make_processes(made, make_topology(made), "ssh") if p.role == "trainer")
    start = trainer.argv.index("-m")
    assert trainer.argv[start : start + 3] == ("-m", "firesteel.cli.app", "run")
    again = load_recipe("quickstart", trainer.argv[start + 4 :])
    assert again.target.endpoints == ["http://127.0.0.1:" + again.target.endpoints[0].rsplit(":", 1)[1], again.target.endpoints[1]]
    assert again.hidden.exchange == "/mnt/all/exchange/toy"


def test_environment_and_pythons_by_role(folder: Path) -> None:
    made = recipe(folder, hidden={"transport": "mooncake"})
    made.cluster.env.inference, made.cluster.env.training, made.cluster.env.master = {"A": "1"}, {"B": "x y"}, {"C": "3"}
    made.target.vllm.python = "/opt/vllm/bin/python"  # not on this machine
    master, *others = make_processes(made, make_topology(made), "ssh")
    assert master.argv[0] == "/opt/vllm/bin/mooncake_master"
    assert master.env == {"C": "3"}
    server, trainer = others[0], others[-1]
    assert server.argv[0] == "/opt/vllm/bin/python"
    assert server.env["A"] == "1"
    assert trainer.shell().startswith("B='x y' ")
    made.cluster.python = None
    assert make_processes(made, make_topology(made), "ssh")[-1].argv[0] == sys.executable


def test_nodes_at_one_address_are_parts_of_one_machine(folder: Path) -> None:
    def devices(made: Recipe, launcher: str) -> list[str | None]:
        return [p.env.get("CUDA_VISIBLE_DEVICES") for p in make_processes(made, make_topology(made), launcher)]

    one = accelerated(folder, "10.0.0.1", "10.0.0.1")
    assert devices(one, "ssh") == ["0,1", "2,3", "4,5,6,7"]
    assert devices(accelerated(folder, "127.0.0.1", "127.0.0.2"), "local") == ["0,1", "2,3", "4,5,6,7"]
    assert devices(accelerated(folder, "10.0.0.1", "10.0.0.2"), "ssh") == ["0,1", "2,3", None], "a trainer node that is a whole machine"
    assert devices(one, "kubernetes") == [None, None, None], "a pod has its own"
    one.cluster.groups[0].tensor_parallel = 8
    one.cluster.groups[0].inference, one.cluster.groups[0].training = ["s", "t"], ["u"]
    one.cluster.nodes.append(one.cluster.nodes[0].model_copy(update={"name": "u"}))
    assert devices(one, "ssh") == ["0,1,2,3", "4,5,6,7", "8,9,10,11"], "each part of a server has its own node's"


def test_addresses_that_only_the_shell_knows_are_variables_in_any_word() -> None:
    node = unknown_address("a-1")
    script = f'NODE_A_1=10.0.0.9; printf "%s|" {quote(node)} {quote("x=" + node + ":80")} {quote(json.dumps({"a": node, "b": "it is $HOME"}))}'
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert out == '10.0.0.9|x=10.0.0.9:80|{"a": "10.0.0.9", "b": "it is $HOME"}|'
    assert Process("n", "server", None, ("a b", "c")).shell() == "'a b' c"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rack", "cpu"])
def test_the_slurm_script_is_accepted(name: str, folder: Path, tmp_path: Path) -> None:
    made = load_recipe(RACK) if name == "rack" else recipe(folder)
    script = tmp_path / "job.sbatch"
    script.write_text(written(made, "slurm"))
    subprocess.run(["bash", "-n", script], check=True)
    check = [str(Path(sys.executable).with_name("shellcheck")), "--shell=bash", "--norc", str(script)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    if shutil.which("sbatch"):  # needs a Slurm controller
        subprocess.run(["sbatch", "--test-only", script], check=True)
    head = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert f"#SBATCH --nodes={len(make_topology(made).nodes)}" in head
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0"} <= set(head)
    assert ("#SBATCH --gpus-per-node=4" in head) == (name == "rack")


def test_the_slurm_script_runs(folder: Path, tmp_path: Path) -> None:
    """With `srun` and `scontrol` in Slurm's place: servers are waited for, the trainer's exit code is the job's, and nothing is left running."""
    made = recipe(folder)
    made.target.vllm.start_timeout = 20
    script, listed = tmp_path / "job.sbatch", folder / "runs/toy/endpoints.txt"
    script.write_text(written(made, "slurm"))
    listed.parent.mkdir(parents=True)
    write_urls(listed, ["http://10.9.9.9:8100"])  # of an earlier job
    bins = tmp_path / "bin"
    bins.mkdir()
    (bins / "scontrol").write_text("#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n127.0.0.3\\n'\n")
    step = 'case $1 in --output=*) exec > "${1#--output=}" 2>&1 ;; --nodelist=*) export FAKE_HOST="${1#--nodelist=}" ;; esac'
    (bins / "srun").write_text(f'#!/bin/bash\nwhile [[ $1 == --* ]]; do {step}; shift; done\nexec "$@"\n')
    for path in bins.iterdir():
        path.chmod(0o755)
    env = {"PATH": f"{bins}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-3]", "FAKE_CODE": "7", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", script], capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["a-server0 is ready", "a-server1 is ready"]
    log = (folder / "runs/toy/launch/logs/a-trainer0.log").read_text()
    assert "http://127.0.0.1:" in log
    assert "http://127.0.0.2:" in log
    write_urls(tmp_path / "as-ssh-writes-it", [f"http://127.0.0.{i}:{made.cluster.groups[0].port}" for i in (1, 2)])
    assert listed.read_text() == (tmp_path / "as-ssh-writes-it").read_text()
    assert sorted(p.name for p in listed.parent.iterdir()) == ["endpoints.txt", "launch"]
    assert subprocess.run(["pgrep", "-f", str(folder / "server-python")], capture_output=True, check=False).returncode == 1


def test_a_step_has_all_of_its_node_and_a_server_its_part(folder: Path) -> None:
    made = accelerated(folder, "10.0.0.1", "10.0.0.2")
    script = written(made, "slurm")
    assert "#SBATCH --gpus-per-node=4\n" in script
    step = next(line.split() for line in script.splitlines() if line.strip().startswith("srun "))
    assert step[:5] == ["srun", "--overlap", "--cpu-bind=none", "--nodes=1", "--ntasks=1"], "no --exact, which leaves a step one processor"
    starts = {line.split()[1]: line.split() for line in script.splitlines() if line.startswith("start ")}
    assert "CUDA_VISIBLE_DEVICES=0,1" in starts["g-server0"]
    assert "CUDA_VISIBLE_DEVICES=2,3" in starts["g-server1"]
    assert starts["g-trainer0"][2:4] == ['"${NODE_T}"', made.cluster.python], "all that the node has"
    made.cluster.slurm.gpus = False
    assert "--gpus" not in written(made, "slurm")


@pytest.mark.parametrize(("launcher", "server"), [("slurm", 'http://"${NODE_A2}":'), ("kubernetes", "http://firesteel-toy-a2-0.firesteel-toy.default.svc:")])
def test_nodes_that_a_scheduler_chooses_need_no_address(launcher: str, server: str, folder: Path) -> None:
    data = settings(folder, cluster={"shared": str(folder)})
    for node in data["cluster"]["nodes"]:
        del node["address"]
    file = folder / "toy.yaml"
    file.write_text(recipe_to_yaml(recipe_from_dict(data)))
    assert server in printed(str(file), "--on", launcher)
    done = CliRunner().invoke(app, ["launch", str(file), "--on", "ssh", "--dry-run"])
    assert "of 127.0.0.1 is wanted twice" in str(done.exception)


def test_ports_that_meet_on_a_node_without_an_address_name_the_node(folder: Path) -> None:
    data = settings(folder, hidden={"transport": "mooncake"}, cluster={"shared": str(folder), "master": "a1"})
    data["hidden"]["mooncake"] = {"port": data["cluster"]["groups"][0]["port"]}
    file = folder / "toy.yaml"
    file.write_text(recipe_to_yaml(recipe_from_dict(data)))
    done = CliRunner().invoke(app, ["launch", str(file), "--on", "slurm", "--dry-run"])
    assert "of node a1 is wanted twice" in str(done.exception)


def test_slurm_gives_one_kind_of_node() -> None:
    made = load_recipe(RACK)
    made.cluster.nodes[2].kind = "b200"
    with pytest.raises(RecipeError, match=r"Slurm gives one kind of node, cluster\.nodes has 2"):
        written(made, "slurm")


def test_manifests_are_valid_by_kubernetes_own_schema() -> None:
    docs = list(yaml.safe_load_all(printed(RACK, "--on", "kubernetes")))
    kinds = [d["kind"] for d in docs]
    assert {k: kinds.count(k) for k in kinds} == {"Service": 1, "ConfigMap": 1, "StatefulSet": 9, "Job": 4}
    for doc in docs:
        for version in ("1.30", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(doc, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**docs[2], "spec": {**docs[2]["spec"], "replica": 1}}, "1.30", strict=True)


def test_manifests_name_each_other_rightly() -> None:
    docs = list(yaml.safe_load_all(printed(RACK, "--on", "kubernetes", "cluster.kubernetes.namespace=lab", "cluster.kubernetes.claim=all")))
    by_name = {(d["kind"], d["metadata"]["name"]): d for d in docs}
    service = "firesteel-kimi-k3-rack"
    assert ("Service", service) in by_name
    server = by_name["StatefulSet", f"{service}-b2"]["spec"]
    assert server["serviceName"] == service
    assert server["selector"]["matchLabels"].items() <= server["template"]["metadata"]["labels"].items()
    container = server["template"]["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert flag(container["command"], "--master-addr") == f"{service}-b1-0.{service}.lab.svc"
    assert "readinessProbe" not in container, "only the first part of a server answers"
    assert by_name["StatefulSet", f"{service}-b1"]["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["port"] == 8100
    pod = by_name["Job", f"{service}-c3-trainer-train"]["spec"]["template"]["spec"]
    own = f"{pod['hostname']}.{pod['subdomain']}.lab.svc"
    command = pod["containers"][0]["command"]
    assert f"hidden.mooncake.address={own}" in command
    assert flag(command, "--rdzv-endpoint") == f"{service}-a3-trainer.{service}.lab.svc:29500"
    assert f"hidden.mooncake.master={service}-a3-0.{service}.lab.svc:50051" in command
    assert "/etc/firesteel/recipe.yaml" in command
    assert pod["initContainers"][0]["command"][-1] == f"http://{service}-d1-0.{service}.lab.svc:8100/health"
    assert {v["name"]: v.get("persistentVolumeClaim") for v in pod["volumes"]}["shared"] == {"claimName": "all"}
    recipe_file = by_name["ConfigMap", service]["data"]["recipe.yaml"]
    assert recipe_from_dict(yaml.safe_load(recipe_file)).drafter == load_recipe(RACK).drafter


def test_another_verb_is_another_job_at_the_same_address() -> None:
    """A Job cannot be changed: `kubectl apply` of the same name with another command is refused. Servers stay as they are."""
    train, calibrate = (list(yaml.safe_load_all(printed(RACK, "--on", "kubernetes", f"cluster.verb={verb}"))) for verb in ("train", "calibrate"))
    before, after = ([d for d in docs if d["kind"] == "Job"] for docs in (train, calibrate))
    assert [d["metadata"]["name"] for d in before] == [f"firesteel-kimi-k3-rack-{g}3-trainer-train" for g in "abcd"]
    assert [d["metadata"]["name"] for d in after] == [f"firesteel-kimi-k3-rack-{g}3-trainer-calibrate" for g in "abcd"]
    hosts = [[d["spec"]["template"]["spec"]["hostname"] for d in jobs] for jobs in (before, after)]
    assert hosts[0] == hosts[1] == [f"firesteel-kimi-k3-rack-{g}3-trainer" for g in "abcd"]
    assert [d for d in train if d["kind"] == "StatefulSet"] == [d for d in calibrate if d["kind"] == "StatefulSet"]


def test_a_name_that_kubernetes_does_not_take() -> None:
    made = load_recipe(RACK)
    made.name = "a-run-with-a-name-that-goes-on-for-ever-and-ever"
    with pytest.raises(RecipeError, match="longer than the 63 characters"):
        written(made, "kubernetes")


def test_launchers_are_known_by_name() -> None:
    done = CliRunner().invoke(app, ["launch", RACK, "--on", "mesos"])
    assert isinstance(done.exception, RecipeError)
    assert "local, ssh, slurm or kubernetes" in str(done.exception)
