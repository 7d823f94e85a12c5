"""REAL: right and wrong answers of a group as a classification (arXiv:2602.05630)."""

from __future__ import annotations

from typing import Literal

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
from posttrain.core.math.masking import masked, row_means


class RealConfig(PluginConfig):
    """Settings of `real`."""

    tau: float = Field(default=0.5, gt=0, le=1_000, description="temperature of the scores (paper)")
    positive: Literal["advantage", "acc"] = Field(
        default="advantage",
        description="which answers are right: those with an advantage above 0, or those that the "
        "task's verdict calls right",
    )


class RealLoss(PolicyLoss[RealConfig]):
    """L_g = ln(1 + sum_{right} e^(-s/tau)) + ln(1 + sum_{wrong} e^(s/tau)), a mean over groups.

    s_i is the mean of logprobs - old_logprobs over answer i. The gradient in s_i is -(1/tau)
    e^(-s_i/tau) / (1 + sum_{right} e^(-s/tau)) for a right answer and mirrored for a wrong one:
    below 1/tau, without a clip, and whatever the size of the advantage. Groups of right answers
    only, or of wrong ones, have none, and count. It is taken once for the whole mini-batch, and
    the value of a token, times its log-prob, is a surrogate: `real/loss` is L. Groups should be
    whole in a mini-batch; use `advantage: {name: dr_grpo}` and binary rewards.
    Source: REAL, arXiv:2602.05630, as in ms-swift.
    """

    name = "real"
    Config = RealConfig
    stops_gradients = True

    def required_columns(self) -> frozenset[str]:
        """Old log-probs, and what says which answers are right."""
        by_advantage = self.config.positive == "advantage"
        return frozenset({"old_logprobs", "advantages" if by_advantage else "acc"})

    def allowed_aggregators(self) -> frozenset[str]:
        """One number per answer, each counted once."""
        return SEQUENCE_AGGREGATORS

    def needs_prepare(self) -> bool:
        """The softmax runs over the answers of a group."""
        return True

    def prepare(self, mini: RolloutBatch, generator: torch.Generator) -> Prepared:
        """`slope` [B]: dL/ds of each answer times N_seq, which the aggregator divides by."""
        mask = mini.mask
        moved = ratios.log_ratios(mini.column("logprobs_now"), mini.column("old_logprobs"), mask)
        scores, there = row_means(moved, mask) / self.config.tau, mask.bool().any(dim=1)
        right = self._right(mini)
        slopes, total = torch.zeros_like(scores), 0.0
        groups = torch.unique(mini.group_id[there]).tolist()
        for group in groups:
            rows = there & (mini.group_id == group)
            sides = [(rows & right, -1.0), (rows & ~right, 1.0)]
            if not all(side.any() for side, _ in sides):
                continue
            for side, sign in sides:
                signed = torch.cat((torch.zeros(1, dtype=torch.float64), sign * scores[side]))
                total += float(signed.logsumexp(dim=0))
                slopes[side] = sign / self.config.tau * signed.softmax(dim=0)[1:]
        count = max(1, len(groups))
        return Prepared(
            columns={"slope": slopes * float(there.sum()) / count},
            metrics={"real/loss": total / count},
        )

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """The surrogate [B, T], with ratio and KL as metrics."""
        assert prepared is not None, "real needs what its prepare returns"
        mask, slope = micro.mask, prepared.columns["slope"].to(logprobs.dtype)
        log_ratio = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        ratio = ratios.clamped(log_ratio, ratios.METRIC_CLAMP).exp()
        metrics = ratios.ratio_metrics(ratio, log_ratio, mask)
        return TokenLoss(slope[:, None] * masked(logprobs, mask), mask, metrics, ratio)

    def _right(self, mini: RolloutBatch) -> Tensor:
        if self.config.positive == "acc":
            return mini.column("acc") >= 1
        return row_means(masked(mini.column("advantages"), mini.mask), mini.mask) > 0
