"""Hinge loss on the gap of log-ratios (RSO, arXiv:2309.06657; SLiC, arXiv:2305.10425)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import relu

from posttrain.core.contracts import AlphaPoConfig, BetaConfig, BetaPairLoss, PairScores, Prepared


class HingeConfig(AlphaPoConfig, BetaConfig):
    """Settings of `hinge`."""


class HingeLoss(BetaPairLoss[HingeConfig]):
    """l = max(0, 1 - beta (u - v)) [B].

    1 at the reference, whatever beta is. The gradient in u is -beta up to a gap of 1 / beta and
    exactly 0 beyond: pairs that are far enough apart are left alone. With `alpha_po` u and v are
    AlphaPO's scores, (1 - exp(-a s)) / a of the mean log-prob s, less the reference's.
    Sources: the normalised hinge loss of RSO, arXiv:2309.06657, after SLiC-HF, arXiv:2305.10425;
    AlphaPO, arXiv:2501.03884.
    """

    name = "hinge"
    Config = HingeConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        chosen, rejected = pairs.chosen, pairs.rejected
        if self.config.alpha_po != 0:
            chosen, rejected = pairs.alpha_scores(self.config.alpha_po)
        return relu(1 - self.config.beta * (chosen - rejected))
