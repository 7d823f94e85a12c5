"""The Ray cluster of a run: joined before its first stage, left after its last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ResourceError
from posttrain.pipelines.ranks.trainer import resources_of_rank
from posttrain.pipelines.services.cluster import require_ray, token_file
from posttrain.pipelines.stage.engines import engine_places


@contextmanager
def joined_cluster(config: RunConfig, home: Path) -> Iterator[None]:
    """Nothing without a section `cluster`. Raises `ResourceError` where it cannot be joined."""
    if config.cluster is None:
        yield
        return
    require_ray()
    from posttrain.core.cluster.on_ray import connection

    token, engines = token_file(home), config.cluster.engines
    cpus = config.limits.learner_ranks * config.cluster.learner.cpus
    cpus += engines.replicas * engines.cpus if engines else 0
    connection.join(config.cluster.ray.address, token if token.is_file() else None, cpus)
    try:
        yield
    finally:
        connection.leave()


def on_this_machine(config: RunConfig) -> RunConfig:
    """The same run with a cluster of its own, if it has one, in the place of somebody's."""
    if config.cluster is None:
        return config
    ray = config.cluster.ray.model_copy(update={"address": "local"})
    cluster = config.cluster.model_copy(update={"ray": ray})
    return config.model_copy(update={"cluster": cluster})


def placement(config: RunConfig, home: Path) -> str:
    """The nodes of the run's cluster, and whether its ranks and servers fit there.

    Reads only, and is empty without a cluster. A cluster of the run's own is not started.
    """
    if config.cluster is None:
        return ""
    cluster, count = config.cluster, config.limits.learner_ranks
    section, engines = cluster.learner, cluster.engines
    ranks = f"{_several(count, 'rank')} of {section.cpus} CPU"
    servers = f"{_several(engines.replicas, 'server')} of {engines.cpus} CPU" if engines else ""
    if config.cluster.ray.address == "local":
        both = f"{ranks} and {servers}" if servers else ranks
        return f"cluster: one of this machine for the run alone, with {both}"
    try:
        with joined_cluster(config, home):
            from posttrain.core.cluster.on_ray import connection

            nodes, places = connection.nodes(), engine_places(config)
    except ResourceError as error:
        return f"cluster: {error}"
    shown, resources = f"cluster: {', '.join(map(str, nodes))}", resources_of_rank(config, nodes)
    if places is not None:
        servers += f"{_gpus(places.gpus)} each"
        fit = connection.room(places.bundle, nodes)
        if fit < places.replicas:
            return (
                f"{shown}; {servers}: only {fit} fit: the run would end after "
                "cluster.ray.start_timeout_s"
            )
        # Servers are placed first, on as few nodes as possible.
        nodes = connection.without(places.bundle, places.replicas, nodes)
        servers += " and "
    fits = connection.room(resources.bundle, nodes)
    of = "of the ranks " if servers else ""
    verdict = "they fit" if fits >= count else f"only {fits} {of}fit"
    if section.min_ranks <= fits < count:
        verdict += ", with which stages go on (cluster.learner.min_ranks)"
    elif fits < count:
        verdict += ": the run would end after cluster.ray.start_timeout_s"
    return f"{shown}; {servers}{ranks}{_gpus(resources.gpus)} each: {verdict}"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _gpus(count: float) -> str:
    return f" and {count:g} GPU" if count else ""
