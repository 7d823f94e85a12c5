"""GRPO with process rewards: step scores normalised in the group (arXiv:2402.03300, 4.1.3)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Advantages, ComparisonConfig, TokenAdvantage
from posttrain.core.math import groups
from posttrain.core.math.steps import scored_steps, sums_of_later_steps


class GrpoProcessConfig(ComparisonConfig):
    """Settings of the `grpo_process` advantage."""

    reduce: Literal["sum", "mean"] = Field(
        default="sum",
        description="of the steps still to come: their sum, which grows with their number (the "
        "paper), or their mean",
    )
    ddof: Literal[0, 1] = Field(default=1, description="1 = unbiased (n - 1), 0 = population")
    eps: float = Field(default=1e-6, ge=0, le=1, description="added to the deviation")


class GrpoProcessAdvantage(TokenAdvantage[GrpoProcessConfig]):
    """A_it = sum over steps j with e_ij >= t of (p_ij - mean(S_g)) / (std(S_g) + eps).

    S_g pools the scores `step_score` [B, S] of *all* steps of all responses of the group; step j of
    response i ends at token e_ij, `step_end` [B, S] (-1 = no step). Tokens after the last step get
    0, and so does a group whose steps are all equal, fewer than two, or of one response (an
    episode of several branches is one).
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.3.
    """

    name = "grpo_process"
    Config = GrpoProcessConfig
    needs: ClassVar[frozenset[str]] = frozenset(
        {"token_rewards", "scored", "step_end", "step_score"}
    )

    def reads_token_rewards(self) -> bool:
        """Only step scores."""
        return False

    def smallest_group(self) -> int:
        """Two, unless a group of one keeps its scores."""
        return 1 if self.config.singleton == "raw" else 2

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """Normalised scores of the steps from each token onwards."""
        step_end, scores = batch.column("step_end"), batch.column("step_score").double()
        valid = scored_steps(step_end, scores)
        normalised = torch.zeros_like(scores)
        leads, num_groups, num_zero, num_singletons = batch.leads(), 0, 0, 0
        for rows in groups.scored_groups(batch.group_id, batch.column("scored")):
            where = torch.zeros_like(valid)
            where[rows] = valid[rows]
            alone = int(leads[rows].sum()) == 1
            normalised[where] = self._pooled(scores[where], alone=alone)
            num_groups += 1
            num_singletons += alone
            num_zero += not normalised[where].any()
        width = batch.response_mask.shape[1]
        tokens = sums_of_later_steps(normalised, step_end, valid, width)
        if self.config.reduce == "mean":
            later = sums_of_later_steps(torch.ones_like(scores), step_end, valid, width)
            tokens = tokens / later.clamp(min=1)
        metrics = {
            "group/zero_adv_frac": num_zero / max(1, num_groups),
            "adv/singleton_groups": float(num_singletons),
        }
        return Advantages(tokens, metrics=metrics)

    def _pooled(self, scores: Tensor, *, alone: bool) -> Tensor:
        """Normalised step scores of one group, in any order."""
        if alone:
            raw = self.config.singleton == "raw"
            return scores / (1 + self.config.eps) if raw else torch.zeros_like(scores)
        if scores.numel() < 2 or groups.all_equal(scores, self.config.zero_tol):
            return torch.zeros_like(scores)
        return groups.z_scores(scores, self.config.ddof, self.config.eps)
