"""Rollout corrections in their general form: one importance weight, and a list of rejections.

A preset names its weight and its rejections; what follows from them is the same for all. Axes: B
sequences, T response tokens.
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar

from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.contracts.base import PluginConfig
from posttrain.core.contracts.policy import Correction, RolloutCorrection
from posttrain.core.math import correction
from posttrain.core.math import correction as correction_metrics
from posttrain.core.math.correction import (
    Rejection,
    Weighting,
    bounded_exp,
    effective_sample_size,
    known_tokens,
    log_ratio,
)
from posttrain.core.math.masking import masked, row_sums


class RejectConfig(PluginConfig):
    """One rejection: what is measured, over what, and which values are kept."""

    stat: correction.Statistic = Field(
        description="k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d, with d = trainer - engine log-prob; "
        "binary_kl = KL of the token against the rest, the larger of both ways"
    )
    level: correction.StatisticLevel = Field(
        description="drop single tokens, or whole responses by their sum, mean or maximum"
    )
    high: float = Field(
        gt=0, description="k1: largest engine / trainer probability ratio kept; others: nats"
    )
    low: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="k1: smallest engine / trainer probability ratio kept; null = 1 / high",
    )

    @model_validator(mode="after")
    def _bounds_fit_the_statistic(self) -> RejectConfig:
        if self.stat != "k1" and self.low is not None:
            raise ValueError(f"{self.stat} is never negative: it has no low, only high")
        if self.stat == "k1" and self.high < 1:
            raise ValueError("high of k1 is a probability ratio and must not exclude 1")
        return self

    def rejection(self) -> Rejection:
        if self.stat != "k1":
            return Rejection(self.stat, self.level, self.high)
        low = 1 / self.high if self.low is None else self.low
        return Rejection(self.stat, self.level, math.log(self.high), math.log(low))


class CorrectionConfig(PluginConfig):
    reject: tuple[RejectConfig, ...] = Field(
        default=(), description="drop what any of these does not keep"
    )
    statistics: Literal["brief", "full"] = Field(
        default="brief",
        description="full: record is_weight/* and reject/*, everything verl does, as well",
    )
    count_empty_seqs: bool = Field(
        default=False, description="statistics over responses include those without tokens (verl)"
    )


class WeightedConfig(CorrectionConfig):
    """Settings of every correction with an importance weight."""

    batch_norm_w: bool = Field(
        default=False, description="divide the weights, once bounded, by their mean in the batch"
    )


CorrectionConfigT = TypeVar("CorrectionConfigT", bound=CorrectionConfig)


class GeneralCorrection(RolloutCorrection[CorrectionConfigT]):
    """`weighting` makes the weight, `rejections` the tokens to keep; both detached.

    A token whose engine log-prob is unknown (NaN) weighs 1 and is kept. With equal log-probs every
    weight is exactly 1 and every token kept: a no-op, bit for bit.
    """

    def weighting(self) -> Weighting | None:
        """The importance weight; None = none."""
        return None

    def rejections(self) -> tuple[Rejection, ...]:
        """What must hold for a token to be kept; those of the config unless extended."""
        return tuple(entry.rejection() for entry in self.config.reject)

    def correct(self, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Correction:
        """Weight and kept tokens [B, T] of a batch, with the metrics of both."""
        weighting, rejections = self.weighting(), self.rejections()
        if weighting is None and not rejections:
            return Correction()
        gaps = log_ratio(logprobs, rollout_logprobs, mask)
        known = known_tokens(rollout_logprobs, mask)
        weight, weight_metrics = self._weigh(gaps, mask, weighting) if weighting else (None, {})
        keep, keep_metrics = self._reject(gaps, known, mask, rejections, logprobs)
        metrics = weight_metrics | keep_metrics | _sample_sizes(gaps, known)
        if keep is not None or (weighting is not None and weighting.bound == "mask"):
            taken = mask.bool() if keep is None else keep.bool()
            taken = taken if weight is None else taken & (weight > 0)
            metrics["mis/drop_frac"] = correction_metrics.share(~taken[mask.bool()])
        return Correction(weight, keep, metrics)

    def _weigh(
        self, gaps: Tensor, mask: Tensor, weighting: Weighting
    ) -> tuple[Tensor, dict[str, float]]:
        """Weight [B, T], 0 under the mask."""
        raw = correction.importance_weights(gaps, weighting.level)
        bounded = correction.bounded_weights(raw, weighting).expand(mask.shape)
        weight = masked(bounded, mask)
        metrics: dict[str, float] = {}
        if weighting.bound == "truncate" and weighting.high < math.inf:
            metrics["tis/clip_frac"] = correction_metrics.share((bounded != raw)[mask.bool()])
        if self.config.statistics == "full" and mask.any():
            found = correction_metrics.weight_statistics(
                raw, weight, mask, weighting, count_empty_seqs=self.config.count_empty_seqs
            )
            metrics |= {f"is_weight/{name}": value for name, value in found.items()}
        if weighting.batch_norm:
            mean = correction.mean_weight(weight, mask, weighting.level)
            metrics["is_weight/norm"] = mean
            weight = weight / mean
        return weight, metrics

    def _reject(
        self,
        gaps: Tensor,
        known: Tensor,
        mask: Tensor,
        rejections: tuple[Rejection, ...],
        logprobs: Tensor,
    ) -> tuple[Tensor | None, dict[str, float]]:
        """Tokens [B, T] to keep, in the mask's dtype; None without rejections."""
        if not rejections:
            return None, {}
        valid = keep = mask.bool()
        metrics: dict[str, float] = {}
        for rejection in rejections:
            statistic = correction.rejection_statistic(gaps, known, rejection, logprobs)
            keep = keep & correction.within(statistic, rejection)
            if self.config.statistics == "full" and known.any():
                found = correction_metrics.rejection_statistics(statistic, known, rejection)
                prefix = f"reject/{rejection.level}_{rejection.stat}"
                metrics |= {f"{prefix}/{name}": value for name, value in found.items()}
        if self.config.statistics == "full":
            rows = correction_metrics.counted_rows(mask, self.config.count_empty_seqs)
            dropped = valid & ~keep
            metrics["reject/token_frac"] = correction_metrics.share(dropped[valid])
            metrics["reject/seq_frac"] = correction_metrics.share(dropped.any(dim=1)[rows])
        return keep.to(mask.dtype), metrics


def _sample_sizes(gaps: Tensor, known: Tensor) -> dict[str, float]:
    """Effective sample sizes of the weights e^d and e^(row sum of d), before any bound."""
    if not known.any():
        return {}
    rows = row_sums(gaps, known)[known.any(dim=1)]
    return {
        "ess/token": effective_sample_size(bounded_exp(gaps[known])),
        "ess/seq": effective_sample_size(bounded_exp(rows)),
    }
