"""Room on the cluster for a group of actors, which is there as a whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from posttrain.core.cluster.on_ray.connection import nodes
from posttrain.core.cluster.on_ray.watch import is_gone, require_cluster
from posttrain.core.errors import ResourceError

POLL_S = 0.2


def placed(
    bundle: Mapping[str, float],
    count: int,
    is_over: Callable[[], bool],
    check: Callable[[], None],
) -> PlacementGroup | None:
    """A placement group with `count` bundles; None where it is not there when `is_over`."""
    require_cluster(wait=True)
    group: PlacementGroup = placement_group([dict(bundle)] * count, strategy="PACK")
    try:
        while not group.wait(POLL_S):
            check()
            require_cluster()
            if is_over():
                remove_placement_group(group)
                return None
    except BaseException:
        if not is_gone():
            remove_placement_group(group)
        raise
    return group


def placed_within(
    bundle: Mapping[str, float], count: int, limit_s: float, check: Callable[[], None]
) -> PlacementGroup | None:
    """As `placed`; None where it is not there within `limit_s`."""
    until = time.monotonic() + limit_s
    return placed(bundle, count, lambda: time.monotonic() > until, check)


def no_room(wanted: str, bundle: Mapping[str, float], limit_s: float, fields: str) -> ResourceError:
    """The sentence for what was not placed: what was asked for, what the nodes have, what to do."""
    each = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    free = ray.available_resources()
    return ResourceError(
        f"the Ray cluster had no room for {wanted} with {each} each within "
        f"{limit_s:g} s (cluster.ray.start_timeout_s). Its nodes: "
        f"{', '.join(map(str, nodes())) or 'none'}; free now: {free.get('CPU', 0.0):g} CPUs, "
        f"{free.get('GPU', 0.0):g} GPUs. Add nodes, end what holds them, or lower {fields}"
    )
