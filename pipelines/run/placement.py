"""Whether what a run wants of its cluster fits there: servers first, then ranks, then pools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.config.cluster_section import NodePoolSection
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ResourceError
from posttrain.pipelines.ranks.trainer import resources_of_rank
from posttrain.pipelines.run.cluster import joined_cluster, pools_of
from posttrain.pipelines.stage.engines import engine_places

if TYPE_CHECKING:
    from posttrain.core.cluster.on_ray.connection import Node

ENDS = "the run would end after cluster.ray.start_timeout_s"


def placement(config: RunConfig, home: Path) -> str:
    """The nodes of the run's cluster, and what fits there, in words.

    Empty without a cluster. Reads only: a cluster of the run's own is not started.
    """
    if config.cluster is None:
        return ""
    if config.cluster.ray.address == "local":
        return f"cluster: one of this machine for the run alone, with {_wanted(config)}"
    try:
        with joined_cluster(config, home):
            from posttrain.core.cluster.on_ray import connection

            nodes = connection.nodes()
            return f"cluster: {', '.join(map(str, nodes))}; {'; '.join(_fitting(config, nodes))}"
    except ResourceError as error:
        return f"cluster: {error}"


def _wanted(config: RunConfig) -> str:
    assert config.cluster is not None
    cluster, engines = config.cluster, config.cluster.engines
    parts = [f"{_several(config.limits.learner_ranks, 'rank')} of {cluster.learner.cpus} CPU"]
    if engines is not None:
        parts.append(f"{_several(engines.replicas, 'server')} of {engines.cpus} CPU")
    parts += [f"{name} with {pool.cpus} CPU" for name, pool in pools_of(cluster)]
    return ", ".join(parts)


def _fitting(config: RunConfig, nodes: Sequence[Node]) -> list[str]:
    """A sentence for each group, in the order they are placed; the last is one that does not fit.

    Each takes as few nodes as possible.
    """
    from posttrain.core.cluster.on_ray.connection import room, without

    assert config.cluster is not None
    said, places = [], engine_places(config)
    if places is not None:
        servers = f"{_several(places.replicas, 'server')} of {places.cpus} CPU{_gpus(places.gpus)}"
        fit = room(places.bundle, nodes)
        if fit < places.replicas:
            return [f"{servers} each: only {fit} fit: {ENDS}"]
        said.append(f"{servers} each: they fit")
        nodes = without(places.bundle, places.replicas, nodes)
    wanted, section = config.limits.learner_ranks, config.cluster.learner
    takes = resources_of_rank(config, nodes)
    fit = room(takes.bundle, nodes)
    verdict = "they fit" if fit >= wanted else f"only {fit} fit"
    if section.min_ranks <= fit < wanted:
        verdict += ", with which stages go on (cluster.learner.min_ranks)"
    elif fit < wanted:
        verdict += f": {ENDS}"
    ranks = f"{_several(wanted, 'rank')} of {section.cpus} CPU{_gpus(takes.gpus)}"
    said.append(f"{ranks} each: {verdict}")
    free = [node.cpus for node in without(takes.bundle, min(wanted, fit), nodes)]
    for name, pool in pools_of(config.cluster):
        free, sentence = _placed(name, pool, free)
        said.append(sentence)
    return said


def _placed(name: str, pool: NodePoolSection, free: list[float]) -> tuple[list[float], str]:
    """CPUs that are free on nodes once they have the pool, and whether they do, in words."""
    used = {index for index, cpus in enumerate(free) if cpus >= pool.cpus}
    used = set(sorted(used)[: pool.nodes])
    left = [cpus - pool.cpus * (index in used) for index, cpus in enumerate(free)]
    wanted = pool.nodes or 1
    if len(used) >= wanted:
        return left, f"{name} with {pool.cpus} CPU on {len(used)} of {len(free)} nodes"
    where = f"on {_several(wanted, 'node')}, only on {len(used)}"
    return left, f"{name} with {pool.cpus} CPU: no room next to the ranks {where}: {ENDS}"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _gpus(count: float) -> str:
    return f" and {count:g} GPU" if count else ""
