"""Two ranks that run a worker of the tests: processes of this machine, or Ray's actors."""

from __future__ import annotations

from posttrain.core.cluster.group import RankGroup
from posttrain.core.cluster.processes import RankProcesses

WORKER = "tests.helpers.rank_worker"
LIGHT = "tests.helpers.light_worker"
"""Starts in half the time: without a model of transformers."""


def nothing() -> None:
    """Nobody stops these tests."""


def started(kind: str, worker: str = WORKER) -> RankGroup:
    env = {"OMP_NUM_THREADS": "1"}
    if kind == "ray":
        from posttrain.core.cluster.on_ray.ranks import RankResources, RayRanks

        resources = RankResources(cpus=1, gpus=0, least=2, start_timeout_s=60)
        ranks: RankGroup = RayRanks(2, worker, env, resources)
    else:
        ranks = RankProcesses(2, worker, env)
    ranks.start(None, nothing)
    return ranks
