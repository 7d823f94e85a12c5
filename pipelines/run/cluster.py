"""The Ray cluster of a run: joined before its first stage, left after its last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import ClusterSection, NodePoolSection
from posttrain.pipelines.services.cluster import require_ray, token_file


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
    connection.join(config.cluster.ray.address, token if token.is_file() else None, cpus)
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
