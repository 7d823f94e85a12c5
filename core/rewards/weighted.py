"""The rewards of a stage: weight, name in records, and which answers each one scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.core.config.rl_stage import RewardComponent, reward_labels
from posttrain.core.types import TASK

if TYPE_CHECKING:
    from posttrain.core.contracts import Reward
    from posttrain.core.types import Problem


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward plugin and its factor in the sum; `label` is what records call it.

    With `only_if` it is 0 where the reward of that name is below 1 or missing. With `tasks` it
    scores answers to problems of these tasks of a mixture alone.
    """

    reward: Reward[Any]
    weight: float
    label: str = ""
    only_if: str | None = None
    tasks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its label, or the plugin's name where it has none."""
        return self.label or self.reward.name

    def scores(self, problem: Problem) -> bool:
        """Whether it scores answers to `problem`."""
        return not self.tasks or problem.metadata.get(TASK) in self.tasks


def weighted_rewards(
    components: Sequence[RewardComponent], build: Callable[[RewardComponent], Reward[Any]]
) -> list[WeightedReward]:
    """The rewards that a stage lists, in order."""
    return [
        WeightedReward(build(given), given.weight, label, given.only_if, given.tasks or ())
        for given, label in zip(components, reward_labels(components), strict=True)
    ]
