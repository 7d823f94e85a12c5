"""Plus one for a right answer, minus one for any other (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.types import RewardSample, Score


class DapoRuleReward(Reward[NoConfig]):
    """R_i = +1 if the task's verdict is fully correct, else -1.

    z-scores of a group are those of the 0/1 reward `accuracy`; advantages that only subtract a mean
    (`dr_grpo`, `rloo`) are twice as large. The logged accuracy stays in [0, 1].
    Source: DAPO, arXiv:2503.14476, eq. 7.
    """

    name = "dapo_rule"
    Config = NoConfig
    needs_answer = True
    runs_in = "host"

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order; never unscored."""
        return [
            Score(
                1.0 if sample.verdict.correct >= 1.0 else -1.0,
                detail="no answer found" if sample.verdict.parsed is None else "",
            )
            for sample in samples
        ]
