"""ORPO: supervised learning with an odds-ratio term, no reference (arXiv:2403.07691)."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared
from posttrain.core.math.preference import log_odds_ratio


class OrpoConfig(BetaConfig):
    """Settings of `orpo`. `beta` is the paper's lambda, the factor of the odds-ratio term."""

    sft_coef: float = Field(
        default=1.0,
        ge=0,
        le=1_000,
        description="factor of the chosen answers' token-mean NLL (paper: 1)",
    )


class OrpoLoss(BetaPairLoss[OrpoConfig]):
    """l = sft_coef * NLL(chosen) - beta logsigmoid(log odds ratio) [B].

    odds = p / (1 - p) of p = exp(S(y) / |y|), the geometric mean of an answer's token
    probabilities. No reference model is loaded. Equal mean log-probs cost beta ln 2 plus the NLL.
    Source: arXiv:2403.07691, eq. 6 and 7.
    """

    name = "orpo"
    Config = OrpoConfig
    needs_reference = False
    reads_scores = False
    per_token_reward = True

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        loss = -self.config.beta * logsigmoid(self._log_odds(pairs))
        sft_coef = self.config.sft_coef
        return loss + sft_coef * pairs.token_mean_nll() if sft_coef > 0 else loss

    def metrics(self, pairs: PairScores) -> Mapping[str, Tensor]:
        """The log odds ratio, and its logsigmoid."""
        log_odds = self._log_odds(pairs).detach()
        return {"pref/log_odds": log_odds, "pref/log_sigmoid_odds": logsigmoid(log_odds)}

    def _log_odds(self, pairs: PairScores) -> Tensor:
        return log_odds_ratio(*pairs.per_token(*pairs.logps()))
