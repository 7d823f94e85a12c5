"""A node's part of scoring: a pool of workers there, with the limits and the isolation of any."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.contracts.spec import Shipped
from posttrain.core.rewards.pool import ScorePool
from posttrain.core.rewards.protocol import PoolSetup
from posttrain.core.types import RewardSample, Score


@dataclass(frozen=True, slots=True)
class NodeRewards:
    """What a node's pool is built from; `context` as in `PoolSetup`."""

    rewards: Shipped
    context: bytes
    limits: tuple[float, ...]
    workers: int


def build(setup: NodeRewards) -> ScoringNode:
    """The pool of this node. Raises where a reward is missing, or a sandbox is too weak."""
    return ScoringNode(setup)


class ScoringNode:
    """A `NodeWorker` that scores samples."""

    def __init__(self, setup: NodeRewards) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="posttrain-plugins-")
        try:
            specs = setup.rewards.unpacked(Path(self._folder.name))
            self._pool = ScorePool(PoolSetup(specs, setup.context), setup.limits, setup.workers)
        except BaseException:
            self._folder.cleanup()
            raise
        try:
            self._pool.wait_ready()
        except BaseException:
            self.close()
            raise

    def answer(self, items: Sequence[RewardSample]) -> Sequence[tuple[Score, ...]]:
        """For each sample its score by each reward."""
        return list(zip(*self._pool.score(items), strict=True))

    def close(self) -> None:
        """End the workers."""
        self._pool.close()
        self._folder.cleanup()
