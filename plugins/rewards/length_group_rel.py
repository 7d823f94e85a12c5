"""A price on length that grows with how well the group does: long answers to easy prompts cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.types import RewardSample, Score


class LengthGroupRelConfig(PluginConfig):
    """Settings of `length_group_rel`."""

    factor: float = Field(
        default=0.1, ge=0, description="w, the price of the longest response of a solved group"
    )


class LengthGroupRelReward(Reward[LengthGroupRelConfig]):
    """R_i = -w * mean_g(correct) * T_i / max_g(T), g the responses to one prompt.

    Added to `accuracy` with weight 1 it is R_i - mean(R) w T_i / max T. `correct` is the task's
    verdict, T_i counts tokens. A group that nobody solves pays nothing. The responses to a problem
    must be scored in one call, so this runs in the host process; problems are distinguished by
    their keys, so one drawn twice in a batch is one group here.
    Source: prime-rl, length penalty relative to the group.
    """

    name = "length_group_rel"
    Config = LengthGroupRelConfig
    needs_answer = True
    runs_in = "host"
    after_clip = True

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order; never unscored."""
        groups: defaultdict[str, list[RewardSample]] = defaultdict(list)
        for sample in samples:
            groups[sample.problem.key].append(sample)
        price = {
            key: self.config.factor
            * (sum(s.verdict.correct for s in group) / len(group))
            / max(1, *(len(s.response_ids) for s in group))
            for key, group in groups.items()
        }
        return [Score(0.0 - price[s.problem.key] * len(s.response_ids)) for s in samples]
