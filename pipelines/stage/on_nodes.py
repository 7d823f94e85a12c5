"""What of a stage runs on the nodes of the run's cluster in addition to its learner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from posttrain.core.config.cluster_section import NodePoolSection
from posttrain.core.rollout.answers import AnswersHere
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.inputs import Episodes

if TYPE_CHECKING:
    from posttrain.core.cluster.on_ray.pools import PoolResources
    from posttrain.core.rewards.scoring import Scorer

AT_ONCE = 256
"""Turns that a node answers at once where the config says nothing."""


def _resources(context: StageContext, name: str, section: NodePoolSection) -> PoolResources:
    from posttrain.core.cluster.on_ray.pools import PoolResources

    assert context.run.cluster is not None
    limit = context.run.cluster.ray.start_timeout_s
    return PoolResources(f"cluster.{name}", section.cpus, section.nodes, limit)


@contextmanager
def scored_on_nodes(context: StageContext, scorer: Scorer) -> Iterator[None]:
    """Let the nodes of the cluster score what the scorer's pool would, if the config says so."""
    cluster, pool = context.run.cluster, scorer.pool
    with ExitStack() as opened:
        if pool is not None:
            opened.enter_context(pool)
        if pool is not None and cluster is not None and cluster.rewards is not None:
            from posttrain.core.cluster.on_ray.pools import RayNodes
            from posttrain.core.rewards.on_nodes import WORKER, RewardsOnNodes, sharing
            from posttrain.core.rewards.pool import RewardPool

            assert isinstance(pool, RewardPool), "build_scorer made it"
            section = cluster.rewards
            resources = _resources(context, "rewards", section)
            share = sharing(pool.limits, section.cpus)
            nodes = RayNodes(WORKER, resources, share, context.warn)
            scorer.pool = opened.enter_context(
                RewardsOnNodes(pool, nodes, section.cpus, context.warn, context.check)
            )
        yield


@contextmanager
def answered_on_nodes(context: StageContext, episodes: Episodes | None) -> Iterator[None]:
    """Let the nodes of the cluster make the environment's steps, if the config says so."""
    cluster = context.run.cluster
    if cluster is None or cluster.environments is None or not isinstance(episodes, EpisodeRunner):
        yield
        return
    from posttrain.core.cluster.on_ray.pools import RayNodes
    from posttrain.core.rollout.on_nodes import WORKER, AnswersOnNodes, sharing

    section, here = cluster.environments, episodes.answers
    assert isinstance(here, AnswersHere), "`episodes_of` made them"
    at_once = min(section.at_once or AT_ONCE, here.at_once)
    resources = _resources(context, "environments", section)
    nodes = RayNodes(WORKER, resources, sharing(at_once, section.timeout_s), context.warn)
    with AnswersOnNodes(here, nodes, at_once, context.warn, context.check) as answers:
        episodes.answers = answers
        try:
            yield
        finally:
            episodes.answers = here
