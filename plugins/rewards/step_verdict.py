"""The task's verdict on each step of a response, for process-supervised advantages."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.types import RewardSample, Score


class StepVerdictReward(Reward[NoConfig]):
    """R_i = mean of the step verdicts, and each verdict as a score at the token that ends its step.

    A response in which the task finds no step scores 0. The task must verify steps.
    Source: process supervision by a verifier, DeepSeekMath, arXiv:2402.03300, section 4.1.3.
    """

    name = "step_verdict"
    Config = NoConfig
    runs_in = "host"
    gives_steps = True

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order, with its steps."""
        scores = []
        for sample in samples:
            steps = sample.steps
            mean = sum(step.correct for step in steps) / len(steps) if steps else 0.0
            scores.append(Score(mean, detail="" if steps else "no step found", steps=steps))
        return scores
