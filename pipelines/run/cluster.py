"""The Ray cluster of a run: joined before its first stage, left after its last."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.core.config.cluster_section import ClusterSection, NodePoolSection
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ResourceError
from posttrain.pipelines.services.cluster import require_ray, token_file

ADDRESS_VARIABLE = "POSTTRAIN_RAY_ADDRESS"


def address_of(config: RunConfig) -> str:
    """HOST:PORT of the run's cluster, or `local`. Raises `ResourceError` where neither is known."""
    assert config.cluster is not None
    address = config.cluster.ray.address
    if address != "env":
        return address
    named = os.environ.get(ADDRESS_VARIABLE, "")
    if not re.fullmatch(r"[^\s:/]+:[0-9]{1,5}", named):
        raise ResourceError(
            f"cluster.ray.address is env, and the variable {ADDRESS_VARIABLE} is "
            f"{named or 'not set'}: expected HOST:PORT, as infra/slurm and infra/kubernetes set it"
        )
    return named


@contextmanager
def joined_cluster(config: RunConfig, home: Path) -> Iterator[None]:
    """Nothing without a section `cluster`. Raises `ResourceError` where it cannot be joined."""
    if config.cluster is None:
        yield
        return
    require_ray()
    from posttrain.core.cluster.on_ray import connection

    token, section = token_file(home), config.cluster
    cpus = config.limits.learner_ranks * section.learner.cpus
    cpus += sum(pool.cpus for _, pool in pools_of(section))  # one node has one of each
    cpus += section.engines.replicas * section.engines.cpus if section.engines else 0
    connection.join(address_of(config), token if token.is_file() else None, cpus)
    try:
        yield
    finally:
        connection.leave()


def pools_of(cluster: ClusterSection) -> list[tuple[str, NodePoolSection]]:
    """The pools that a run has on nodes, by the name of their section, in the order they start."""
    named = (("rewards", cluster.rewards), ("environments", cluster.environments))
    return [(name, section) for name, section in named if section is not None]


def on_this_machine(config: RunConfig) -> RunConfig:
    """The same run with a cluster of its own, if it has one, in the place of somebody's.

    Ranks decide in which order sums are added; pools and servers elsewhere decide nothing, so there
    are none.
    """
    if config.cluster is None:
        return config
    ray = config.cluster.ray.model_copy(update={"address": "local"})
    changes = {"ray": ray, "engines": None, "rewards": None, "environments": None}
    cluster = config.cluster.model_copy(update=changes)
    return config.model_copy(update={"cluster": cluster})
