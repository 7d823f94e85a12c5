"""The section `sampled_evaluation` of an rl stage: avg@k and pass@k while it trains."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.config.base import Section
from posttrain.core.config.sections import EvaluationSection


class SampledEvaluationSection(Section):
    """Several sampled answers to a few held-out problems, every few steps: avg@k and pass@k.

    The problems are the first of the run's held-out ones, and answers have the length limit of its
    section `evaluation`. What is trained is the same with and without it.
    """

    every: int = Field(
        default=20, ge=1, description="steps; also before the first step and after the last"
    )
    num_problems: int = Field(
        default=16, ge=2, description="at most `evaluation.num_problems`, whose first ones they are"
    )
    k: int = Field(
        default=8,
        ge=2,
        le=128,
        description="answers to each problem: avg@k, and pass@1, 2, 4 and so on up to k",
    )
    temperature: float = Field(default=1.0, gt=0, le=100, description="of the sampled answers")
    top_p: float = Field(default=1.0, gt=0, le=1, description="of the sampled answers; 1 = off")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The k of every pass@k: powers of two below k, and k itself."""
        powers = [1 << i for i in range(self.k.bit_length()) if 1 << i < self.k]
        return (*powers, self.k)

    def as_evaluation(self, whole: EvaluationSection) -> EvaluationSection:
        """The same as a section of an evaluation, with the limits of `whole`."""
        return EvaluationSection(
            num_problems=min(self.num_problems, whole.num_problems),
            max_response_length=whole.max_response_length,
            num_samples=self.k,
            temperature=self.temperature,
            top_p=self.top_p,
            # So many problems at a time that about as many answers are decoded together.
            batch_size=max(1, whole.batch_size // self.k),
        )
