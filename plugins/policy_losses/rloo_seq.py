"""A clipped loss on the likelihood ratio of whole responses (as TRL trains RLOO)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import (
    SEQUENCE_AGGREGATORS,
    PolicyLoss,
    Prepared,
    SequenceRatioConfig,
    TokenLoss,
)
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked


class RlooSeqConfig(SequenceRatioConfig):
    """Settings of `rloo_seq`."""

    clip_low: float = Field(default=0.2, ge=0, le=1, description="ratio floor is 1 - clip_low")
    clip_high: float = Field(
        default=0.2, ge=0, le=1_000, description="ratio ceiling is 1 + clip_high"
    )


class RlooSeqLoss(PolicyLoss[RlooSeqConfig]):
    """l_i = max(-A_i s_i, -A_i clip(s_i, ...)), s_i = exp(sum_t(logprobs - old_logprobs)).

    The response's value stands at each of its tokens [B, T]. The gradient in a token's log-prob is
    -A_i s_i per unit of l_i, |y_i| times that of `gspo` at s_i = 1; most long answers are clipped.
    Source: responses as single actions, RLOO, arXiv:2402.14740, in the clip of PPO,
    arXiv:1707.06347, eq. 7; the form is TRL's.
    """

    name = "rloo_seq"
    Config = RlooSeqConfig

    def allowed_aggregators(self) -> frozenset[str] | None:
        """One value per response wants the mean over responses."""
        return None if self.config.allow_any_agg else SEQUENCE_AGGREGATORS

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with the response's ratio and clip fractions as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        advantages = ratios.row_advantages(advantages, mask, config.adv_reduce, self.name)
        by_token = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        of_row = ratios.row_log_ratios(by_token, mask, reduce="sum", bound=config.ratio_clamp)
        ratio = masked(of_row.expand_as(by_token), mask).exp()
        low, high = 1 - config.clip_low, 1 + config.clip_high
        loss = ratios.clipped_loss(ratio, advantages, low, high)
        flags = ratios.clip_metrics(ratio, advantages, mask, low, high)
        metrics = flags | ratios.ratio_metrics(ratio, by_token, mask)
        metrics["clip/seq_frac"] = ratios.row_flags(flags["clip/frac"], mask)
        return TokenLoss(loss, mask, metrics, ratio)
