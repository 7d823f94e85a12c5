"""DPO: the policy as its own reward model (arXiv:2305.18290, eq. 7), with its common additions."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor
from torch.nn.functional import relu

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared
from posttrain.core.math.preference import smoothed_logistic


class DpoConfig(BetaConfig):
    """Settings of `dpo`."""

    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="assumed share of swapped labels (cDPO); TRL: 0"
    )
    length_norm: bool = Field(
        default=False, description="divide each answer's score by its tokens; beta is then larger"
    )
    sft_coef: float = Field(
        default=0.0,
        ge=0,
        le=1_000,
        description="factor of the chosen answers' token-mean NLL (RPO: 1)",
    )
    dpop_lambda: float = Field(
        default=0.0, ge=0, description="penalty on chosen answers that lose probability (DPOP: 50)"
    )
    margin_coef: float = Field(
        default=0.0, ge=0, description="factor of the pair's own margin in the data (ODPO: 1)"
    )


class DpoLoss(BetaPairLoss[DpoConfig]):
    """l = -(1 - e) logsigmoid(h) - e logsigmoid(-h) + sft_coef * NLL(chosen), all [B].

    h = beta (z - dpop_lambda max(0, -u)) - margin_coef * margin, z = u - v, e = label_smoothing. A
    policy equal to its reference costs ln 2 whatever beta is. Without additions the gradient in u
    is -beta sigmoid(-beta z) and in v its negative: only the difference counts, so both answers may
    lose probability while the loss falls (metric `pref/both_falling`).
    Sources: DPO arXiv:2305.18290 eq. 7; label smoothing: the authors' note on cDPO (2023); NLL:
    RPO arXiv:2404.19733 eq. 1; DPOP arXiv:2402.13228; margin: ODPO arXiv:2402.10571.
    """

    name = "dpo"
    Config = DpoConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        config = self.config
        chosen, rejected = pairs.chosen, pairs.rejected
        if config.length_norm:
            chosen, rejected = pairs.per_token(chosen, rejected)
        gap = chosen - rejected
        if config.dpop_lambda > 0:
            gap = gap - config.dpop_lambda * relu(-chosen)
        logits = config.beta * gap - config.margin_coef * pairs.margin
        loss = smoothed_logistic(logits, config.label_smoothing)
        return loss + config.sft_coef * pairs.token_mean_nll() if config.sft_coef > 0 else loss
