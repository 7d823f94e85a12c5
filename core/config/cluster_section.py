"""The section `cluster`: what a run takes of a Ray cluster."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.config.base import Section


class RaySection(Section):
    """The Ray cluster that a run uses."""

    address: str = Field(
        default="local",
        pattern=r"^(local|env|[^\s:/]+:[0-9]{1,5})$",
        description="HOST:PORT of a cluster of which this machine is a node (`posttrain cluster "
        "up`, `ray start`), or env: the one that POSTTRAIN_RAY_ADDRESS names, or local: one of "
        "this machine, for the run alone",
    )
    start_timeout_s: float = Field(
        default=120.0, gt=0, le=1_000_000, description="what the cluster has to find room, seconds"
    )


class LearnerSection(Section):
    """What the learner's ranks take of a cluster."""

    cpus: int = Field(default=1, ge=1, le=10_000, description="CPUs, and threads, of a rank")
    gpus: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="GPUs of a rank; not set = one where nodes have some, unless model.device is "
        "cpu",
    )
    min_ranks: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="where limits.learner_ranks do not fit, at the start or after a loss, the "
        "stage goes on with fewer, down to this",
    )
    peer_timeout_s: float = Field(
        default=300.0,
        ge=10,
        le=86_400,
        description="a rank that waits so long for another in a collective gives it up as lost, "
        "seconds: one that hangs, or to which the link is cut where only Ray's head still sees it",
    )
    shard_size: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="ranks that share one copy of weights and moments; each such group has a copy "
        "(HSDP): the GPUs of a node, where links between nodes are slow. limits.learner_ranks is a "
        "multiple of it; not set = all ranks share one",
    )


class EnginesSection(Section):
    """vLLM servers on the nodes of a cluster."""

    replicas: int = Field(default=1, ge=1, le=10_000, description="servers")
    cpus: int = Field(default=1, ge=1, le=10_000, description="CPUs of a server")
    gpus: int | None = Field(
        default=None,
        ge=0,
        le=1_000,
        description="GPUs of a server, which are its tensor parallel size; not set = one where "
        "nodes have some, unless model.device is cpu",
    )


class NodePoolSection(Section):
    """Processes on nodes of the cluster, one on each."""

    cpus: int = Field(default=1, ge=1, le=10_000, description="CPUs that each takes of its node")
    nodes: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="nodes that have one; not set = each that has room next to the learner's ranks",
    )


class RewardNodesSection(NodePoolSection):
    """Rewards that run in workers, scored on nodes: `cpus` are the workers of each."""


class EnvironmentNodesSection(NodePoolSection):
    """Environments and their tools, called on nodes."""

    at_once: int | None = Field(
        default=None,
        ge=1,
        le=2_048,
        description="turns that a node answers at once, in threads; not set = as many as the tools "
        "allow, up to 256. A tool that takes fewer (at_once of its class, which is 1 unless it "
        "says otherwise) has its way",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=1_000_000,
        description="seconds that the answer to one turn may take; then its node is given up",
    )


class ClusterSection(Section):
    """Where a run does its work if not as processes of this machine. Changes no result."""

    ray: RaySection = RaySection()
    learner: LearnerSection = LearnerSection()
    engines: EnginesSection | None = Field(
        default=None,
        description="servers of engine vllm_server on the cluster's nodes; not set = on this "
        "machine",
    )
    rewards: RewardNodesSection | None = Field(
        default=None, description="score rewards on nodes; not set = on the run's machine"
    )
    environments: EnvironmentNodesSection | None = Field(
        default=None, description="call environments on nodes; not set = in the run's process"
    )
