"""Process and outcome together: both group-relative, each normalised by itself, then added."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Advantages, TokenAdvantage
from posttrain.plugins.advantages.grpo import GrpoAdvantage, GrpoConfig
from posttrain.plugins.advantages.grpo_process import GrpoProcessAdvantage, GrpoProcessConfig


class ProcessPlusOutcomeConfig(GrpoProcessConfig):
    """Settings of `process_plus_outcome`: those of `grpo_process`, and the two factors."""

    outcome_coef: float = Field(
        default=1.0, ge=0, le=1_000, description="factor of the outcome's advantage"
    )
    process_coef: float = Field(
        default=1.0, ge=0, le=1_000, description="factor of the steps' advantage"
    )
    norm_by_std: bool = Field(
        default=True, description="divide the outcome's advantage by its group's deviation"
    )

    @model_validator(mode="after")
    def _some_factor(self) -> ProcessPlusOutcomeConfig:
        if self.outcome_coef == 0 and self.process_coef == 0:
            raise ValueError("outcome_coef and process_coef are both 0, so nothing can be learned")
        return self


class ProcessPlusOutcomeAdvantage(TokenAdvantage[ProcessPlusOutcomeConfig]):
    """A_it = c_o A^out_i + c_p A^proc_it: `grpo` of the reward, `grpo_process` of the steps.

    The reward is the sum of `token_rewards` [B, T]; give the reward that scores steps weight 0 to
    keep it out of that sum. Each part is normalised in its group before the sum, so neither's scale
    matters, and a group of equal rewards still has the signal of its steps.
    Source: DeepSeekMath, arXiv:2402.03300, sections 4.1.2 and 4.1.3.
    """

    name = "process_plus_outcome"
    Config = ProcessPlusOutcomeConfig
    needs: ClassVar[frozenset[str]] = frozenset(
        {"token_rewards", "scored", "step_end", "step_score"}
    )

    def __init__(self, config: ProcessPlusOutcomeConfig) -> None:
        super().__init__(config)
        shared = config.model_dump(include={"singleton", "zero_tol", "ddof", "eps"})
        self.outcome = GrpoAdvantage(GrpoConfig(**shared, norm_by_std=config.norm_by_std))
        self.process = GrpoProcessAdvantage(GrpoProcessConfig(**shared, reduce=config.reduce))

    def smallest_group(self) -> int:
        """Two, unless a group of one keeps its scores."""
        return self.process.smallest_group()

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """The weighted sum, with the outcome's metrics."""
        outcome = self.outcome.estimate(batch)
        process = self.process.token_advantages(batch).advantages
        tokens = (
            self.config.outcome_coef * outcome.advantages.double()
            + self.config.process_coef * process
        )
        return Advantages(tokens, metrics=outcome.metrics)
