"""Optimal token baseline: at each position, a group mean weighted by the score's squared norm."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Advantages, ComparisonConfig, TokenAdvantage
from posttrain.core.math import groups
from posttrain.core.math.masking import close_gaps, masked, reopen_gaps
from posttrain.core.math.returns import rewards_to_go


class OptimalTokenBaselineConfig(ComparisonConfig):
    """Settings of the `optimal_token_baseline` advantage."""

    align: Literal["padded", "valid"] = Field(
        default="padded",
        description="responses meet at the same column, or at the same index among sampled tokens "
        "(tool use), responses without any left out of the group",
    )
    handle_zero_tail: bool = Field(
        default=True,
        description="past the second-longest response the longest has baseline 0; false: its own "
        "return, so advantage 0",
    )
    weighted: bool = Field(
        default=False, description="weigh by the squared rollout correction `is_weight` as well"
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="added to the sum of weights")


class OptimalTokenBaselineAdvantage(TokenAdvantage[OptimalTokenBaselineConfig]):
    """A_it = G_it - b_t, b_t = sum_i G_it W_it / (sum_i W_it + eps) over the group at position t.

    G_it is the sum of `token_rewards` [B, T] from t onwards. W_it is the running sum over the
    sampled tokens up to t of 1 - 2 pi_old(y_j) + sum_v pi_old(v)^2: the squared norm of the score
    in the logits. `sum_pi_squared` [B, T] is that last term. An all-equal group gets 0, tail and
    all. Branches of one episode are refused: they have several tokens at a position and one return.
    Source: verl 0.9.1, `optimal_token_baseline`.
    """

    name = "optimal_token_baseline"
    Config = OptimalTokenBaselineConfig
    needs: ClassVar[frozenset[str]] = frozenset(
        {"token_rewards", "scored", "old_logprobs", "sum_pi_squared"}
    )
    takes_branches: ClassVar[bool] = False

    def required_columns(self) -> frozenset[str]:
        """`is_weight` too when weighted."""
        needs = super().required_columns()
        return needs | {"is_weight"} if self.config.weighted else needs

    def smallest_group(self) -> int:
        """Two, unless a group of one keeps its returns."""
        return 1 if self.config.singleton == "raw" else 2

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """Returns less the baseline of their position, group by group."""
        mask, valid_only = batch.response_mask.bool(), self.config.align == "valid"
        onwards = rewards_to_go(batch.column("token_rewards"), mask)
        weights, present = self._weights(batch, mask), mask
        compared = batch.column("scored").bool()
        if valid_only:
            onwards, weights = close_gaps(onwards, mask), close_gaps(weights, mask)
            present = close_gaps(mask, mask)
            compared = compared & mask.any(dim=1)
        result = torch.zeros_like(onwards)
        num_groups = num_zero = num_singletons = 0
        for rows in groups.scored_groups(batch.group_id, compared):
            result[rows] = self._of_group(onwards[rows], weights[rows], present[rows])
            num_groups += 1
            num_singletons += rows.numel() == 1
            num_zero += not result[rows].any()
        metrics = {
            "group/zero_adv_frac": num_zero / max(1, num_groups),
            "adv/singleton_groups": float(num_singletons),
        }
        return Advantages(reopen_gaps(result, mask) if valid_only else result, metrics=metrics)

    def _weights(self, batch: RolloutBatch, mask: Tensor) -> Tensor:
        """W [B, T]: squared norms of the scores of all tokens so far."""
        chosen = masked(batch.column("old_logprobs"), mask).double().exp()
        norms = 1 - 2 * chosen + batch.column("sum_pi_squared").double()
        if self.config.weighted:
            norms = norms * batch.column("is_weight").double().square()
        return masked(norms, mask).cumsum(dim=1)

    def _of_group(self, onwards: Tensor, weights: Tensor, present: Tensor) -> Tensor:
        """Advantages [G, T] of one group; `present` [G, T] marks its sampled tokens."""
        if len(onwards) == 1:
            return onwards if self.config.singleton == "raw" else torch.zeros_like(onwards)
        returns = onwards[present]
        if returns.numel() == 0 or groups.all_equal(returns, self.config.zero_tol):
            return torch.zeros_like(onwards)
        shares = masked(weights, present)
        baseline = (onwards * shares).sum(dim=0) / (shares.sum(dim=0) + self.config.eps)
        if self.config.handle_zero_tail:
            position = torch.arange(1, present.shape[1] + 1)
            ends = masked(position.expand(present.shape), present).amax(dim=1)
            baseline = torch.where(position > ends.topk(2).values[1], 0.0, baseline)
        return masked(onwards - baseline, present)
