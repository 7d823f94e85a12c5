"""GSPO-token: the response's ratio, each token's own gradient (arXiv:2507.18071, eq. 13)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PolicyLoss, Prepared, RatioConfig, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked


class GspoTokenConfig(RatioConfig):
    """Settings of `gspo_token`."""

    clip_low: float = Field(default=3e-4, ge=0, le=1, description="ratio floor is 1 - clip_low")
    clip_high: float = Field(
        default=4e-4, ge=0, le=1_000, description="ratio ceiling is 1 + clip_high"
    )
    log_ratio_max: float | None = Field(
        default=None, gt=0, description="cap of the response's log ratio, nats (verl: 10)"
    )


class GspoTokenLoss(PolicyLoss[GspoTokenConfig]):
    """l_it = max(-A_it s_it, -A_it clip(s_it, ...)), s_it = sg(s_i) exp(lp_it - sg(lp_it)).

    s_i is GSPO's ratio of the whole response, so the value of s_it is s_i, and its gradient goes to
    token t alone. With one advantage per response it has the value and gradient of `gspo` under
    every aggregator; advantages may also differ between tokens. All tensors are [B, T].
    Source: GSPO, arXiv:2507.18071, eq. 13 and 14.
    """

    name = "gspo_token"
    idle_at_zero = True
    Config = GspoTokenConfig

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with the response's ratio and clip fractions as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        by_token = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        of_row = ratios.row_log_ratios(by_token.detach(), mask)
        new = masked(logprobs, mask)
        # The row's term is added last: lp - sg(lp) is exactly 0, and stays so.
        log_ratio = ratios.clamped((new - new.detach()) + of_row, config.ratio_clamp)
        if config.log_ratio_max is not None:
            log_ratio = log_ratio.clamp(max=config.log_ratio_max)
        ratio = masked(log_ratio, mask).exp()
        low, high = 1 - config.clip_low, 1 + config.clip_high
        loss = ratios.clipped_loss(ratio, advantages, low, high)
        flags = ratios.clip_metrics(ratio, advantages, mask, low, high)
        metrics = flags | ratios.ratio_metrics(ratio, by_token, mask)
        metrics["clip/seq_frac"] = ratios.row_flags(flags["clip/frac"], mask)
        return TokenLoss(loss, mask, metrics, ratio)
