"""The section `cluster` of a recipe: machines, groups and what runs where. Without it a run has one machine. Taken from `firesteel.recipe`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from firesteel.recipe_sections import Section


class Node(Section):
    name: str = Field(..., description="Name of the machine in this recipe.", pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    address: str = Field("127.0.0.1", description="Address at which the other nodes and `ssh` reach it.", min_length=1)
    kind: str = Field("cpu", description="Its row in the hardware table: gb300, b200, h200, h100, cpu, or one of cluster.hardware.")
    accelerators: int = Field(
        1,
        description="Accelerators that a run may use. A node of kind cpu has none: it gets as many servers as if it had them, but one trainer process.",
        ge=1,
    )


class Group(Section):
    name: str = Field(..., description="Name of the group.", pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    inference: list[str] = Field(default_factory=list, description="Nodes whose servers capture the target's states, in order.")
    training: list[str] = Field(default_factory=list, description="Nodes whose trainer processes use them.")
    tensor_parallel: int | None = Field(
        None, description="Accelerators of one server; more than a node has spread it over whole nodes. Empty: target.vllm.tensor_parallel.", ge=1
    )
    port: int = Field(8100, description="Port of a node's first server; further ones on the node count up.", ge=1, le=65535)


class RoleEnv(Section):
    inference: dict[str, str] = Field(default_factory=dict, description="Environment of the servers.")
    training: dict[str, str] = Field(default_factory=dict, description="Environment of the trainers.")
    master: dict[str, str] = Field(default_factory=dict, description="Environment of the Mooncake master.")


class Slurm(Section):
    partition: str | None = Field(None, description="Partition to ask for; empty: the cluster's default.")
    account: str | None = Field(None, description="Account that pays; empty: the user's default.")
    time: str = Field("24:00:00", description="Longest time of the job, as Slurm writes it.")
    gpus: bool = Field(True, description="Ask for each node's accelerators with --gpus-per-node; false where Slurm does not count them.")


class Kubernetes(Section):
    namespace: str = Field("default", description="Namespace of all objects.")
    image: str = Field("firesteel:latest", description="Image of the trainers: Firesteel and its Python.")
    inference_image: str | None = Field(None, description="Image of servers and Mooncake master: vLLM's environment with Firesteel; empty: image.")
    claim: str | None = Field(None, description="PersistentVolumeClaim, writable from many nodes, that is mounted at cluster.shared; pods share nothing else.")
    resource: str = Field("nvidia.com/gpu", description="Name under which the cluster counts accelerators.")


class Cluster(Section):
    launcher: Literal["local", "ssh", "slurm", "kubernetes"] = Field(
        "local", description="What `firesteel launch` starts processes with, unless --on says otherwise."
    )
    nodes: list[Node] = Field(default_factory=list, description="The machines; empty: only this one.")
    groups: list[Group] = Field(default_factory=list, description="Which nodes capture and which train; empty: one group of all nodes, the last one trains.")
    verb: Literal["run", "extract", "train", "calibrate"] = Field(
        "run",
        description="What is done with the servers: the whole line, by one process; the stage before training, by one; training or calibration, by all.",
    )
    trainers_per_node: int | None = Field(None, description="Trainer processes of a training node; empty: one an accelerator.", ge=1)
    rendezvous_port: int = Field(29500, description="Port at which trainer processes find each other, on the first training node.", ge=1, le=65535)
    server_rendezvous_port: int = Field(
        29600, description="Port at which the parts of a server on several nodes find each other, on its first node.", ge=1, le=65535
    )
    max_restarts: int = Field(0, description="Times that torchrun starts the trainers again after a failure.", ge=0)
    restarts: int = Field(
        2, description="Times that `firesteel launch` starts a server or the Mooncake master again that has ended, after ever longer pauses.", ge=0
    )
    master: str | None = Field(None, description="Node of the Mooncake master with hidden.transport=mooncake; empty: the first training node.")
    shared: str | None = Field(
        None, description="Folder that all nodes see at the same path: the recipe, the run's folder, and states with hidden.transport=disk."
    )
    python: str | None = Field(None, description="Python with Firesteel on the nodes; empty: this one's path, on Kubernetes `python`.")
    env: RoleEnv = Field(default_factory=RoleEnv, description="Environment by role.")
    ssh_options: list[str] = Field(default_factory=list, description="Further options of `ssh`, such as [-l, trainer, -p, '2222'].")
    connect_timeout: float = Field(15.0, description="Seconds until a node counts as unreachable.", gt=0)
    hardware: str | None = Field(None, description="YAML file with rows that add to the hardware table, or replace its own.")
    slurm: Slurm = Field(default_factory=Slurm, description="The Slurm allocation.")
    kubernetes: Kubernetes = Field(default_factory=Kubernetes, description="The Kubernetes objects.")
