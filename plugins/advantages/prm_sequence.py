"""Process rewards as an outcome: one number of a response's step scores, against its group."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig
from posttrain.core.math import groups
from posttrain.core.math.steps import Aggregate, aggregate_steps, scored_steps


class PrmSequenceConfig(GroupConfig):
    """Settings of the `prm_sequence` advantage."""

    aggregate: Aggregate = Field(
        default="mean", description="what becomes of a response's step scores p_1 .. p_K"
    )
    weights: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        default=None,
        min_length=1,
        description="of `weighted`: factor of the first, second, ... step; the last one holds for "
        "all further steps",
    )
    baseline: Literal["z-score", "centre", "loo"] = Field(
        default="z-score", description="in the group: as `grpo`, as `dr_grpo` or as `rloo`"
    )
    ddof: Literal[0, 1] = Field(default=1, description="1 = unbiased (n - 1), 0 = population")
    eps: float = Field(default=1e-6, ge=0, le=1, description="added to the deviation")

    @model_validator(mode="after")
    def _weights_are_used(self) -> PrmSequenceConfig:
        if (self.aggregate == "weighted") != (self.weights is not None):
            raise ValueError("aggregate: weighted and weights belong together; set both or neither")
        return self


class PrmSequenceAdvantage(GroupAdvantage[PrmSequenceConfig]):
    """R_i = agg_j p_ij, then A_i = (R_i - mean_g) / (std_g + eps) or another group baseline.

    p_ij are the step scores `step_score` [B, S] of steps that end at `step_end` [B, S] (-1 = no
    step). `weighted` is sum_j w_j p_j / sum_j w_j. A response without a scored step stays out of
    its group and gets 0. Source: Lightman et al., arXiv:2305.20050 (`prod`, `min`).
    """

    name = "prm_sequence"
    Config = PrmSequenceConfig
    needs: ClassVar[frozenset[str]] = frozenset(
        {"token_rewards", "scored", "step_end", "step_score"}
    )

    def reads_token_rewards(self) -> bool:
        """Only step scores."""
        return False

    def compared(self, batch: RolloutBatch) -> Tensor:
        """Scored rows with at least one scored step."""
        steps = scored_steps(batch.column("step_end"), batch.column("step_score"))
        return super().compared(batch) & steps.any(dim=1)

    def row_rewards(self, batch: RolloutBatch) -> Tensor:
        """The aggregate [B] of the step scores."""
        scores = batch.column("step_score")
        valid = scored_steps(batch.column("step_end"), scores)
        return aggregate_steps(scores, valid, self.config.aggregate, self.config.weights or ())

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Scores [G] against the group."""
        config, size = self.config, rewards.numel()
        if config.baseline == "z-score":
            return groups.z_scores(rewards, config.ddof, config.eps)
        centred = rewards - rewards.mean()
        return centred * (size / (size - 1)) if config.baseline == "loo" else centred

    def alone(self, rewards: Tensor) -> Tensor:
        """Mean 0 and deviation 1 stand for what a group of one does not have."""
        return rewards / (1 + self.config.eps) if self.config.baseline == "z-score" else rewards
