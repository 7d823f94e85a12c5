"""The Ray cluster of a run: joined before its first stage, left after its last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import ClusterSection, NodePoolSection
from posttrain.core.errors import ResourceError
from posttrain.pipelines.ranks.trainer import resources_of_rank
from posttrain.pipelines.services.cluster import require_ray, token_file

if TYPE_CHECKING:
    from posttrain.core.cluster.on_ray.connection import Node


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

    Ranks decide in which order sums are added; pools decide nothing, so there are none.
    """
    if config.cluster is None:
        return config
    ray = config.cluster.ray.model_copy(update={"address": "local"})
    changes = {"ray": ray, "rewards": None, "environments": None}
    cluster = config.cluster.model_copy(update=changes)
    return config.model_copy(update={"cluster": cluster})


def placement(config: RunConfig, home: Path) -> str:
    """The nodes of the run's cluster, and whether its ranks and pools fit there.

    Empty without a cluster. Reads only. A cluster of the run's own is not started.
    """
    if config.cluster is None:
        return ""
    section, count = config.cluster.learner, config.limits.learner_ranks
    ranks = f"{count} rank{'' if count == 1 else 's'} of {section.cpus} CPU"
    if config.cluster.ray.address == "local":
        pools = "".join(f", {name} with {p.cpus} CPU" for name, p in pools_of(config.cluster))
        return f"cluster: one of this machine for the run alone, with {ranks}{pools}"
    try:
        with joined_cluster(config, home):
            from posttrain.core.cluster.on_ray import connection

            nodes = connection.nodes()
    except ResourceError as error:
        return f"cluster: {error}"
    resources = resources_of_rank(config, nodes)
    fits = connection.room(resources.bundle, nodes)
    verdict = "they fit" if fits >= count else f"only {fits} fit"
    if section.min_ranks <= fits < count:
        verdict += ", with which stages go on (cluster.learner.min_ranks)"
    elif fits < count:
        verdict += ": the run would end after cluster.ray.start_timeout_s"
    each = f" and {resources.gpus:g} GPU" if resources.gpus else ""
    said = [f"{', '.join(map(str, nodes))}; {ranks}{each} each: {verdict}"]
    free = _beside_ranks(nodes, resources.bundle, min(count, fits))
    for name, pool in pools_of(config.cluster):
        free, sentence = _placed(name, pool, free)
        said.append(sentence)
    return f"cluster: {'; '.join(said)}"


def _beside_ranks(nodes: Sequence[Node], bundle: Mapping[str, float], count: int) -> list[float]:
    """CPUs that are free on each node once `count` ranks are packed onto as few as possible."""
    free = []
    for node in sorted(nodes, key=lambda node: -_room_on(node, bundle)):
        here = min(count, _room_on(node, bundle))
        count -= here
        free.append(node.cpus - here * bundle.get("CPU", 0.0))
    return free


def _room_on(node: Node, bundle: Mapping[str, float]) -> int:
    """How many ranks fit on one node."""
    from posttrain.core.cluster.on_ray.connection import room

    return room(bundle, [node])


def _placed(name: str, pool: NodePoolSection, free: list[float]) -> tuple[list[float], str]:
    """What is free on nodes once they have the pool, and whether they do, in words."""
    fit = [index for index, cpus in enumerate(free) if cpus >= pool.cpus]
    used = set(fit[: pool.nodes])
    left = [cpus - pool.cpus * (index in used) for index, cpus in enumerate(free)]
    wanted = pool.nodes or 1
    said = f"{name} with {pool.cpus} CPU on {len(used)} of {len(free)} nodes"
    if len(used) < wanted:
        said = (
            f"{name} with {pool.cpus} CPU: no room next to the ranks on {wanted} "
            f"node{'' if wanted == 1 else 's'}, only on {len(used)}: the run would end after "
            "cluster.ray.start_timeout_s"
        )
    return left, said
