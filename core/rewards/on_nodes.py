"""Rewards scored by the nodes of a cluster, and by this machine where no node is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

from posttrain.core.cluster.node_pool import NodePool, Sharing, Unanswered, map_or_here
from posttrain.core.contracts import Reward
from posttrain.core.contracts.spec import Shipped
from posttrain.core.rewards.node_worker import NodeRewards
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.rewards.workers import START_LIMIT_S
from posttrain.core.sandbox.required import isolations
from posttrain.core.types import RewardSample, Score

WORKER = "posttrain.core.rewards.node_worker"
PER_WORKER = 8
"""Samples of a node's smallest batches, for each of its workers."""
GRACE_S = 30.0


def sharing(limits: Sequence[float], workers: int) -> Sharing:
    """Batches one after another; each sample may take all its time, and the workers may be late."""
    start = 2 * START_LIMIT_S + GRACE_S
    return Sharing(
        limit_s=lambda count: start + math.ceil(count / workers) * sum(limits),
        least=PER_WORKER * workers,
    )


class RewardsOnNodes:
    """Scores as `local` does, by pools of the same kind on nodes; a context manager.

    A sample whose node is lost is scored on another. Where none is left, `local` scores, after a
    warning. One that takes processes of nodes with it, the last when alone there, has crashed.
    """

    def __init__(
        self,
        local: RewardPool,
        nodes: NodePool,
        workers: int,
        warn: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.local, self.nodes, self.workers = local, nodes, workers
        self.samples_per_s = 0.0
        self._warn, self._check = warn, check

    @property
    def rewards(self) -> tuple[Reward[Any], ...]:
        """As of the pool."""
        return self.local.rewards

    def __enter__(self) -> Self:
        needed = (isolations(f"reward '{r.name}'", r.config) for r in self.rewards)
        setup = NodeRewards(
            Shipped.of(self.local.setup.rewards, chain.from_iterable(needed)),
            self.local.setup.context,
            tuple(self.local.limits),
            self.workers,
        )
        try:
            self.nodes.start(setup, self._check)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the pools; may be called twice."""
        self.nodes.close()
        self.local.close()

    def score(self, samples: Sequence[RewardSample]) -> list[list[Score]]:
        """For each reward its scores of `samples`, in order."""
        began = time.monotonic()
        found = map_or_here(
            self.nodes,
            samples,
            self._check,
            lambda rest: list(zip(*self.local.score(rest), strict=True)),
            lambda count, reason: self._warn(
                f"rewards: {count} of {len(samples)} samples are scored by the run's own "
                f"machine: {reason}"
            ),
        )
        each = len(self.rewards)
        rows = [
            (Score(None, "crashed", row.reason),) * each if isinstance(row, Unanswered) else row
            for row in found
        ]
        self.samples_per_s = each * len(samples) / max(1e-9, time.monotonic() - began)
        return [[row[reward] for row in rows] for reward in range(each)]
