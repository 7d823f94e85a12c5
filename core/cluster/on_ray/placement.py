"""Room on the cluster for a group of actors, which is there as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from posttrain.core.cluster.on_ray.watch import require_cluster

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
        remove_placement_group(group)
        raise
    return group
