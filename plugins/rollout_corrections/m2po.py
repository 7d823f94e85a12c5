"""M2PO: drop the tokens that moved furthest until the second moment is bounded."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Correction, CorrectionConfig, GeneralCorrection
from posttrain.core.math.correction import known_tokens, log_ratio, share, smallest_within_mean


class M2poConfig(CorrectionConfig):
    """Settings of `m2po`."""

    tau: float = Field(
        default=0.04, gt=0, description="largest mean of ln(r)^2 over the candidates kept (paper)"
    )
    anchor: Literal["roll", "old"] = Field(
        default="roll",
        description="r is against the engine's log-probs, or the trainer's old ones",
    )


class M2po(GeneralCorrection[M2poConfig]):
    """x_t = ln(r_t)^2; drop the largest x until mean(x) <= tau over the candidates that are left.

    Candidates are the tokens that move on in the direction of their advantage: A > 0 and r > 1, or
    A < 0 and r < 1; other tokens are always kept. r is of the policy at the start of the optimizer
    step, and the order is over the whole mini-batch, so neither micro-batches nor ranks matter. The
    counts stay. Use it with a loss without a clip, such as `importance_pg`. With R the largest
    ratio or its inverse, chi^2 is at most R^2 mean(x).
    Source: M2PO, arXiv:2510.01161.
    """

    name = "m2po"
    Config = M2poConfig
    reads_mini = True

    def correct_mini(self, mini: RolloutBatch) -> Correction:
        """Tokens [B, T] to keep, with the mean of x before and after."""
        roll = self.config.anchor == "roll"
        anchor = mini.rollout_logprobs if roll else mini.column("old_logprobs")
        moved = log_ratio(mini.column("logprobs_now"), anchor, mini.mask).double()
        advantages = torch.where(mini.mask.bool(), mini.column("advantages"), 0.0)
        candidates = known_tokens(anchor, mini.mask) & (advantages * moved > 0)
        x = moved[candidates].square()
        stays = smallest_within_mean(x, self.config.tau)
        keep = mini.mask.bool().clone()
        keep[candidates] = stays
        metrics = {"m2po/dropped_frac": share(~keep[mini.mask.bool()])}
        if x.numel():
            metrics["m2po/second_moment"] = float(x.mean())
        return Correction(keep=keep.to(mini.mask.dtype), metrics=metrics)
