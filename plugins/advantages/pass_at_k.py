"""Advantages for the best of k responses: three estimators of pass@k's gradient."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig
from posttrain.core.errors import RunError
from posttrain.core.math import groups
from posttrain.core.math import groups as subsets


class PassAtKConfig(GroupConfig):
    """Settings of the `pass_at_k` advantage."""

    variant: Literal["max_minus_second", "analytic", "loo_maxk"] = Field(
        default="max_minus_second", description="which of the three formulas of the docstring"
    )
    k: int = Field(default=4, ge=1, description="draws of analytic and loo_maxk")
    baseline: Literal["without", "minus_one"] = Field(
        default="without",
        description="of loo_maxk: the best of k others, or of k - 1 others (no advantage below 0)",
    )
    norm_by_std: bool = Field(
        default=False, description="of max_minus_second: divide by the group's deviation (verl)"
    )
    ddof: Literal[0, 1] = Field(default=1, description="1 = unbiased (n - 1), 0 = population")
    eps: float = Field(default=1e-6, ge=0, le=1, description="added to the deviation")

    @model_validator(mode="after")
    def _has_one_less(self) -> PassAtKConfig:
        if self.variant == "loo_maxk" and self.baseline == "minus_one" and self.k < 2:
            raise ValueError("baseline: minus_one draws k - 1 others, so k must be 2 or more")
        return self


class PassAtKAdvantage(GroupAdvantage[PassAtKConfig]):
    """The same advantage on every token of response i; R_i is the sum of `token_rewards` [B, T].

    `max_minus_second`: the best response gets R_(1) - R_(2), the others and ties 0. Source:
    arXiv:2503.19595. `analytic`, for verdicts `acc` of 0 and 1, c of N right, n = N - c:
    P = 1 - C(n, k) / C(N, k), s = sqrt(P (1 - P)); right ones get (1 - P) / s, wrong ones
    (1 - P - C(n-1, k-1) / C(N-1, k-1)) / s; they sum to 0. Source: arXiv:2508.10751, eq. 11-15.
    `loo_maxk`: A_i = E[max of k with i] - E[max of k without i] over subsets of the group; k = 1 is
    `rloo`, and (k / G) sum_i A_i score_i is unbiased. Source: arXiv:2505.15201.
    """

    name = "pass_at_k"
    Config = PassAtKConfig

    def smallest_group(self) -> int:
        """As many as the formula draws, and those it leaves out."""
        config, smallest = self.config, super().smallest_group()
        if config.variant == "max_minus_second":
            return smallest
        needs_one_more = config.variant == "loo_maxk" and config.baseline == "without"
        return max(smallest, config.k + needs_one_more)

    def reads_token_rewards(self) -> bool:
        """`analytic` looks at verdicts only."""
        return self.config.variant != "analytic"

    def required_columns(self) -> frozenset[str]:
        """`acc` too for `analytic`."""
        needs = super().required_columns()
        return needs | {"acc"} if self.config.variant == "analytic" else needs

    def row_rewards(self, batch: RolloutBatch) -> Tensor:
        """Outcome rewards, or for `analytic` the verdicts, which must be 0 or 1."""
        if self.config.variant != "analytic":
            return super().row_rewards(batch)
        acc = batch.column("acc").double()
        odd = [x for x in acc[self.compared(batch)].tolist() if x not in (0.0, 1.0)]
        if odd:
            raise RunError(
                f"pass_at_k, variant analytic, needs verdicts of 0 or 1, but one is {odd[0]}: use "
                "variant: loo_maxk, which takes any rewards"
            )
        return acc

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Advantages [G] by the configured formula."""
        config, k = self.config, self.config.k
        if config.variant == "analytic":
            return subsets.pass_at_k_scores(rewards, k)
        if config.variant == "loo_maxk":
            left_out = k if config.baseline == "without" else k - 1
            without = subsets.expected_max_without_each(rewards, left_out)
            return subsets.expected_max_with_each(rewards, k) - without
        best = rewards.topk(2)
        result = torch.zeros_like(rewards)
        if groups.all_equal(best.values, config.zero_tol):
            return result
        std = groups.sample_std(rewards, config.ddof) + config.eps if config.norm_by_std else 1.0
        result[best.indices[0]] = (best.values[0] - best.values[1]) / std
        return result
