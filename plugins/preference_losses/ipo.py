"""IPO: a squared loss that ends at a fixed gap (arXiv:2310.12036, eq. 17)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import AlphaPoConfig, PairLoss, PairScores, Prepared


class IpoConfig(AlphaPoConfig):
    """Settings of `ipo`."""

    tau: float = Field(
        default=0.1, gt=0, description="strength of the pull to the reference (TRL's beta: 0.1)"
    )
    norm: Literal["mean", "sum"] = Field(
        default="mean",
        description="an answer's score per token (TRL, AReaL), or its sum (OpenRLHF)",
    )


class IpoLoss(PairLoss[IpoConfig]):
    """l = (h - 1 / (2 tau))^2 [B], h = u / n_c - v / n_j (norm: mean) or u - v (norm: sum).

    At the reference h = 0, so the first loss is 1 / (4 tau^2): 25 for tau 0.1. The gradient in h is
    2 (h - 1 / (2 tau)): it turns round once the gap is 1 / (2 tau), where DPO's never ends. With
    `alpha_po` h is the difference of AlphaPO's scores, each the mean of its tokens.
    Sources: arXiv:2310.12036 eq. 17; the mean per token is what its authors reported to TRL;
    AlphaPO, arXiv:2501.03884.
    """

    name = "ipo"
    Config = IpoConfig

    def reward_scale(self) -> float | None:
        """tau."""
        return self.config.tau

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        chosen, rejected = pairs.chosen, pairs.rejected
        if self.config.alpha_po != 0:  # a mean per token by itself
            chosen, rejected = pairs.alpha_scores(self.config.alpha_po)
        elif self.config.norm == "mean":
            chosen, rejected = pairs.per_token(chosen, rejected)
        return (chosen - rejected - 1 / (2 * self.config.tau)).square()
