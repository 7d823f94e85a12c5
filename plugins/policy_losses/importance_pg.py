"""The importance-weighted policy gradient without any clip."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AnchoredConfig, AnchoredLoss, Prepared, TokenLoss
from posttrain.core.math.masking import masked
from posttrain.core.math.ratios import log_ratios, ratio_metrics


class ImportancePgLoss(AnchoredLoss[AnchoredConfig]):
    """l = -A r, r = exp(logprobs - old_logprobs): the surrogate that PPO and TRPO bound.

    All tensors are [B, T]. The gradient in a token's log-prob is -r A, never cut.
    Source: conservative policy iteration, as written in PPO, arXiv:1707.06347, eq. 6.
    """

    name = "importance_pg"
    idle_at_zero = True
    Config = AnchoredConfig

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with ratio and KL to the anchor as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        log_ratio = log_ratios(logprobs, self.anchor_logprobs(micro), mask, config.ratio_clamp)
        ratio = log_ratio.exp()
        metrics = ratio_metrics(ratio, log_ratio, mask)
        return TokenLoss(-advantages * ratio, mask, metrics, ratio)
