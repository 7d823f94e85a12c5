"""The task's own verdict as the reward."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.types import RewardSample, Score


class AccuracyReward(Reward[NoConfig]):
    """R_i = verdict.correct of the task's verifier, in [0, 1].

    An answer that could not be read is a 0 like any wrong one, and its score says so.
    Source: rule-based accuracy reward, DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """

    name = "accuracy"
    Config = NoConfig
    needs_answer = True
    runs_in = "host"
    is_verdict = True

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order; never unscored."""
        return [
            Score(
                float(sample.verdict.correct),
                detail="no answer found" if sample.verdict.parsed is None else "",
            )
            for sample in samples
        ]
