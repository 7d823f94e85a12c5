"""`Scorer`: everything an RL stage does between finished responses and advantages, in fixed order.

Raw components, their weighted sum, clipping, terms on length and form, overlong filtering,
whitening, and the place on the last token. Filters of groups, which look at raw accuracy, and KL in
the reward come after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from posttrain.core.baseline import greedy_rewards
from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import RolloutEngine, Task
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.reward_shaping import RewardShaping
from posttrain.core.rewards.failures import check_failure_rate
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.core.scoring import OnMissing, WeightedReward, rollout_metrics, score_batch


@dataclass
class Scorer:
    """The rewards of one stage with their pool and their shaping."""

    task: Task[Any]
    rewards: Sequence[WeightedReward]
    tokenizer: ChatTokenizer
    clip: tuple[float | None, float | None] = (None, None)
    on_missing: OnMissing = "zero"
    max_failure_rate: float = 1.0
    pool: RewardPool | None = None
    shaping: RewardShaping = field(default_factory=RewardShaping)

    @property
    def names(self) -> list[str]:
        """Names of the rewards, in the order of their components."""
        return [weighted.reward.name for weighted in self.rewards]

    def score(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """`batch` with its reward columns, and metrics; `RunError` if too many rewards failed."""
        scored = score_batch(
            batch,
            self.task,
            self.rewards,
            self.tokenizer,
            self.clip,
            on_missing=self.on_missing,
            pool=self.pool,
        )
        check_failure_rate(scored, self.names, self.max_failure_rate)
        metrics = rollout_metrics(scored, self.names)
        if self.pool is not None:
            metrics["reward/pool_samples_per_s"] = self.pool.samples_per_s
        shaped, found = self.shaping.apply(scored)
        return shaped, metrics | found

    def greedy(
        self,
        engine: RolloutEngine[Any],
        batch: RolloutBatch,
        max_tokens: int,
        episodes: EpisodeRunner | None = None,
    ) -> Tensor:
        """Rewards [B] of the greedy answers to the prompts of a scored `batch`, on its scale."""
        found = greedy_rewards(
            engine,
            self.tokenizer,
            self.task,
            self.rewards,
            batch,
            max_tokens,
            self.clip,
            on_missing=self.on_missing,
            pool=self.pool,
            episodes=episodes,
        )
        return self.shaping.rescaled(found)
