"""The Ray cluster of a run: joined before its first stage, left after its last."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ResourceError
from posttrain.pipelines.ranks.trainer import resources_of_rank
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

    token, cpus = token_file(home), config.limits.learner_ranks * config.cluster.learner.cpus
    connection.join(address_of(config), token if token.is_file() else None, cpus)
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
    """The nodes of the run's cluster, and whether its ranks fit there; empty without a cluster.

    Reads only. A cluster of the run's own is not started.
    """
    if config.cluster is None:
        return ""
    section, count = config.cluster.learner, config.limits.learner_ranks
    ranks = f"{count} rank{'' if count == 1 else 's'} of {section.cpus} CPU"
    if config.cluster.ray.address == "local":
        return f"cluster: one of this machine for the run alone, with {ranks}"
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
    return f"cluster: {', '.join(map(str, nodes))}; {ranks}{each} each: {verdict}"
