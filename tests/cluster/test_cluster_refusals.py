"""What a cluster cannot be is refused before anything starts: one clear error each, naming the setting and the mend; several at once as a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster_fakes import recipe, settings
from ports import free_port
from typer.testing import CliRunner

from firesteel.cli.app import app
from firesteel.cluster.hands import Local, Ssh
from firesteel.cluster.hardware import load_hardware
from firesteel.cluster.probe import check_versions
from firesteel.cluster.process import check_startable
from firesteel.cluster.topology import make_topology
from firesteel.errors import FiresteelError, RecipeError, ResourceError, TrainingError
from firesteel.recipe import Recipe, load_recipe, recipe_from_dict
from firesteel.stages.launch import make_processes
from firesteel.stages.plan import plan_of

HARDWARE = load_hardware()
RACK = "kimi-k3-rack"


def refuse(made: Recipe, words: str, kind: type[FiresteelError] = RecipeError) -> FiresteelError:
    with pytest.raises(kind, match=words) as found:
        plan_of(made, HARDWARE, simulate=0.0)
    assert found.value.mend or "\n" in found.value.message, "an error says how to mend it"
    return found.value


def rack(**cluster: Any) -> Recipe:
    data = load_recipe(RACK).model_dump()
    data["cluster"] |= cluster
    return recipe_from_dict(data)


def test_a_recipe_without_a_cluster_is_this_machine(folder: Path) -> None:
    alone = recipe_from_dict({**settings(folder), "cluster": {}})
    topology, found = plan_of(alone, HARDWARE, simulate=0.0)
    assert [n.name for n in topology.nodes] == ["here"]
    assert (len(topology.servers), topology.world_size, found.nodes) == (1, 1, 1)


def test_the_rack_fits() -> None:
    topology, _ = plan_of(load_recipe(RACK), HARDWARE, simulate=0.0)
    assert (len(topology.nodes), len(topology.servers), topology.world_size) == (12, 4, 16)
    assert [n.name for n in topology.servers[0].nodes] == ["a1", "a2"]
    assert topology.master is not None
    assert topology.master.name == "a3"


def test_servers_share_a_node_that_has_room(folder: Path) -> None:
    made = recipe(folder, cluster={"nodes": [{"name": "n", "kind": "h100", "accelerators": 8}, {"name": "t", "kind": "h100", "accelerators": 1}]})
    made.cluster.groups = [made.cluster.groups[0].model_copy(update={"inference": ["n"], "training": ["t"], "tensor_parallel": 2, "port": 9000})]
    topology = make_topology(made)
    assert [(s.port, s.first) for s in topology.servers] == [(9000, 0), (9001, 2), (9002, 4), (9003, 6)]
    devices = [p.env.get("CUDA_VISIBLE_DEVICES") for p in make_processes(made, topology, "local") if p.role == "server"]
    assert devices == ["0,1", "2,3", "4,5", "6,7"]


def test_overlapping_ports(folder: Path) -> None:
    data = settings(folder, trainers=2)
    port = data["cluster"]["groups"][0]["port"]
    for i, node in enumerate(data["cluster"]["nodes"]):
        node["address"] = f"10.0.0.{i % 3}"  # the second group on the first one's machines
    data["cluster"]["shared"] = "/shared"
    error = refuse(recipe_from_dict(data), f"port {port} of 10.0.0.0 is wanted twice: by server a-server0 and by server b-server0")
    assert "cluster.groups: port" in str(error)


def test_the_masters_port_is_among_them(folder: Path) -> None:
    made = recipe(folder, hidden={"transport": "mooncake"})
    made.cluster.master = "a1"
    made.hidden.mooncake.port = made.cluster.groups[0].port
    refuse(made, "wanted twice: by server a-server0 and by Mooncake master")


def test_nodes_that_a_scheduler_chooses_may_have_one_address(folder: Path) -> None:
    data = settings(folder, cluster={"shared": str(folder)})
    for node in data["cluster"]["nodes"]:
        node["address"] = "127.0.0.1"
    refuse(recipe_from_dict(data), r"of 127\.0\.0\.1 is wanted twice")
    for launcher in ("slurm", "kubernetes"):
        data["cluster"]["launcher"] = launcher
        assert len(plan_of(recipe_from_dict(data), HARDWARE, simulate=0.0)[0].servers) == 2


@pytest.mark.parametrize(
    ("setting", "words"), [("hidden.mooncake.port", "metrics of the Mooncake master"), ("watch.metrics_port", "metrics of trainer a-trainer0")]
)
def test_a_port_beyond_the_last_names_its_setting(folder: Path, setting: str, words: str) -> None:
    made = recipe(folder, hidden={"transport": "mooncake"}, cluster={"trainers_per_node": 2})
    section = made.hidden.mooncake if setting.startswith("hidden") else made.watch
    setattr(section, setting.rsplit(".", 1)[1], 65535)
    error = refuse(made, f"{words} on node a3 would listen at port 65536, and ports end at 65535")
    assert error.mend == f"set a lower {setting}"


@pytest.mark.parametrize("option", ["--failures=0", "--length=0", "--tokens=0"])
def test_a_plan_of_nothing(option: str) -> None:
    done = CliRunner().invoke(app, ["plan", "quickstart", option])
    assert done.exit_code == 2, done.output
    assert "greater than or" in done.output


def test_a_cpu_node_has_servers_by_its_accelerators_and_one_trainer(folder: Path) -> None:
    made = recipe(folder)
    for node in made.cluster.nodes:
        node.accelerators = 3
    topology = make_topology(made)
    assert ([s.nodes[0].name for s in topology.servers], topology.world_size) == (["a1"] * 3 + ["a2"] * 3, 1)


@pytest.mark.parametrize("role", ["training", "inference"])
def test_a_group_without_a_role(folder: Path, role: str) -> None:
    data = settings(folder)
    data["cluster"]["groups"][0][role] = []
    refuse(recipe_from_dict(data), f"a has no {role} node")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"training": ["a9"]}, "a.training names 'a9', which is not among cluster.nodes"),
        ({"inference": ["a1", "a1"]}, "a.inference has 'a1' twice"),
        ({"tensor_parallel": 3}, r"needs 3 equal nodes from a1 on, there are 2"),
    ],
)
def test_nodes_that_are_not_there(folder: Path, change: dict[str, Any], words: str) -> None:
    data = settings(folder)
    data["cluster"]["groups"][0] |= change
    refuse(recipe_from_dict(data), words)


def test_a_node_in_two_groups_a_name_given_twice_and_a_lost_master(folder: Path) -> None:
    data = settings(folder, trainers=2)
    data["cluster"]["groups"][1]["training"] = ["a3"]
    refuse(recipe_from_dict(data), "node a3 is in the groups a and b")
    data = settings(folder)
    data["cluster"]["nodes"][1]["name"] = "a1"
    refuse(recipe_from_dict(data), "cluster.nodes has 'a1' twice")
    made = recipe(folder, hidden={"transport": "mooncake"}, cluster={**settings(folder)["cluster"], "master": "zz"})
    refuse(made, "cluster.master=zz is not among cluster.nodes")


@pytest.mark.parametrize(("width", "words"), [(6, "does not cover whole nodes: a1 has 4"), (3, "leave 1 of a1's 4 idle"), (16, "needs 4 equal nodes")])
def test_servers_that_do_not_divide_into_nodes(width: int, words: str) -> None:
    made = rack()
    made.target.vllm.tensor_parallel = width
    refuse(made, words)


def test_a_node_that_would_capture_and_train_on_the_same_accelerators() -> None:
    data = load_recipe(RACK).model_dump()
    data["cluster"]["groups"][0] |= {"training": ["a1"]}
    data["cluster"]["groups"][0]["inference"] = ["a1", "a2"]
    refuse(recipe_from_dict(data), "node a1 has 4 accelerators, its servers and trainers want 8")


def test_a_world_size_that_does_not_divide() -> None:
    made = rack()
    made.train.context_ranks = 3
    error = refuse(made, "16 trainer processes do not divide into batches of train.context_ranks=3 each")
    assert error.mend is not None
    assert "a divisor of 16" in error.mend


@pytest.mark.parametrize("case", ["another number", "unequal groups"])
def test_a_feed_cut_into_other_groups_than_the_clusters(case: str) -> None:
    data = load_recipe(RACK).model_dump()
    if case == "another number":
        data["hidden"]["feed"]["groups"] = 2
    else:
        data["cluster"]["groups"][3] |= {"inference": ["d1", "d2"], "training": ["d3", "c3"]}
        data["cluster"]["groups"][2] |= {"training": ["b3"]}
        data["cluster"]["groups"][1] |= {"training": ["x1"]}
        data["cluster"]["nodes"].append({"name": "x1", "address": "10.0.0.99", "kind": "gb300", "accelerators": 4})
    refuse(recipe_from_dict(data), "which the 4 of cluster.groups are not")


def test_memory_that_does_not_fit() -> None:
    made = rack()
    made.target.vllm.tensor_parallel = 4
    error = refuse(made, r"Kimi-K3 needs 391\.\d GB \(weights 390\.2.*\), 259\.2 GB may be used, on each of 4 accelerator", ResourceError)
    assert error.mend is not None
    assert "larger tensor_parallel" in error.mend
    made = rack()
    made.train.batch_tokens, made.train.anchors = 65536, 16384
    refuse(made, r"a trainer process needs \d+\.\d GB .* on an accelerator of kind gb300", ResourceError)


def test_layers_that_the_target_does_not_have() -> None:
    made = rack()
    made.target.layer_ids = [24, 94]
    refuse(made, "target.layer_ids has 94, but the target has 93 layers")


def test_an_unknown_kind_and_addresses_that_no_other_node_reaches() -> None:
    made = rack()
    made.cluster.nodes[2].kind = "gb301"
    error = refuse(made, "a3 is of kind 'gb301', which the hardware table does not have")
    assert error.mend is not None
    assert "gb300" in error.mend
    made = rack()
    made.cluster.nodes[3].address = "127.0.0.1"
    refuse(made, r"127\.0\.0\.1 is an address of this machine alone")


def test_a_folder_that_only_one_machine_sees() -> None:
    made = rack(shared=None)
    made.hidden.transport = "disk"
    refuse(made, "hidden.transport=disk needs a folder that all nodes see")


def test_all_that_is_wrong_is_said_at_once() -> None:
    made = rack()
    made.train.context_ranks = 3
    made.cluster.nodes[3].address = "127.0.0.1"
    made.target.vllm.tensor_parallel = 4
    error = refuse(made, "3 things are wrong with this cluster")
    assert error.message.count("\n  - ") == 3
    assert "needs 391" in error.message


def test_several_trainer_processes_train_and_do_nothing_else(folder: Path) -> None:
    with pytest.raises(TrainingError, match="this cluster has 2 trainer processes, and `firesteel run` is the work of one"):
        check_startable(make_topology(recipe(folder, trainers=2)), "run")
    check_startable(make_topology(recipe(folder, trainers=2)), "train")
    check_startable(make_topology(recipe(folder)), "run")


def test_versions_that_differ_are_refused_with_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(folder)
    nodes = make_topology(made).nodes
    other = folder / "other-python"
    other.write_text((folder / "server-python").read_text().replace("0.32.0", "0.31.1"))
    other.chmod(0o755)
    server = str(folder / "server-python")
    found = check_versions(Local(made.cluster), [("inference", nodes[0], server), ("inference", nodes[1], server)])
    assert found["inference", "a2"] == {"python": "3.11", "vllm": "0.32.0"}
    with pytest.raises(ResourceError, match=r"inference nodes differ: vllm is 0\.32\.0 on a1 and 0\.31\.1 on a2") as error:
        check_versions(Local(made.cluster), [("inference", nodes[0], server), ("inference", nodes[1], str(other))])
    assert error.value.mend == "install the same versions on all nodes of a role"
    monkeypatch.setenv("FAKE_VERSIONS", "hello")
    with pytest.raises(ResourceError, match="does not answer like a Python: 'hello'"):
        check_versions(Local(made.cluster), [("inference", nodes[0], server)])
    with pytest.raises(ResourceError, match=r"node a1 \(127\.0\.0\.1\): /no/python cannot be started"):
        check_versions(Local(made.cluster), [("inference", nodes[0], "/no/python")])


def test_a_node_that_cannot_be_reached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real OpenSSH client, against a port of this machine where nothing listens."""
    made = recipe(folder)
    made.cluster.ssh_options = ["-p", str(free_port()), "-o", "StrictHostKeyChecking=no"]
    with pytest.raises(ResourceError, match=r"node a1 \(127\.0\.0\.1\) cannot be reached by ssh: .*refused") as error:
        check_versions(Ssh(made.cluster, "python", None), [("training", make_topology(made).nodes[0], "python")])
    assert error.value.mend is not None
    assert "cluster.ssh_options" in error.value.mend


def test_an_unknown_setting_of_a_node_names_the_nearest(folder: Path) -> None:
    data = settings(folder)
    data["cluster"]["nodes"][0]["adress"] = "10.0.0.1"
    with pytest.raises(RecipeError, match=r"unknown setting cluster\.nodes\.0\.adress; did you mean cluster\.nodes\.address\?"):
        recipe_from_dict(data)
