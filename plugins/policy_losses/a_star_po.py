"""A*-PO: a regression of an answer's log-ratio on its advantage (arXiv:2505.20686)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import (
    SEQUENCE_AGGREGATORS,
    PluginConfig,
    PolicyLoss,
    Prepared,
    TokenLoss,
)
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked, row_sums


class AStarPoConfig(PluginConfig):
    """Settings of `a_star_po`."""

    beta: float = Field(
        default=1e-3,
        gt=0,
        le=1_000,
        description="factor of the log-ratio of a whole answer (beta_2; TRL: 0.001)",
    )


class AStarPoLoss(PolicyLoss[AStarPoConfig]):
    """l_i = (beta (S_i - S_ref_i) - A_i)^2, S = summed log-probs, A_i = R_i - V*.

    The answer's value stands at each of its tokens [B, T]. The gradient in a token's log-prob is 2
    beta (...) per unit of l_i, the same for all tokens, without ratio or clip; where A_i = 0 it
    pulls to the reference, which is loaded without a KL term as well. V* is what the advantage
    `optimal_value` takes off. TRL estimates it once, from samples of the reference; here it is of
    the group's own samples, which are the reference's in the first step alone.
    Source: A*-PO, arXiv:2505.20686; the form is TRL's.
    """

    name = "a_star_po"
    Config = AStarPoConfig
    needs = frozenset({"advantages", "ref_logprobs"})
    uses_ratio = False

    def allowed_aggregators(self) -> frozenset[str]:
        """One value per answer wants the mean over answers."""
        return SEQUENCE_AGGREGATORS

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with both sides of the regression as metrics [B]."""
        mask = micro.mask
        advantages = masked(micro.column("advantages"), mask)
        advantages = ratios.row_advantages(advantages, mask, "none", self.name)
        wanted = torch.where(mask.bool().any(dim=1), advantages.double().sum(dim=1), 0.0)
        wanted = wanted / mask.double().sum(dim=1).clamp(min=1)
        moved = ratios.log_ratios(logprobs, micro.column("ref_logprobs"), mask)
        implied = self.config.beta * row_sums(moved, mask)
        loss = (implied - wanted).square().to(logprobs.dtype)[:, None]
        metrics = {
            "a_star_po/implied_reward": implied.detach(),
            "a_star_po/advantage": wanted.detach(),
        }
        return TokenLoss(masked(loss.expand_as(logprobs), mask), mask, metrics)
