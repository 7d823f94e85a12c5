"""Maths of preference losses: scores of answers from their log-probs, and what losses share.

Axes: B pairs or rows, T completion tokens. Log-probs are nats; sums over tokens are float64.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.core.math.masking import masked, row_means, row_sums

FDivergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]

MAX_EXPONENT = 80.0
"""Exponents are cut here, where exp is still finite in float32; no gradient beyond."""

# A mean log-prob of exactly 0 is an odds of infinity.
_LARGEST_MEAN_LOGP = -1e-12


def capped_exp(values: Tensor) -> Tensor:
    return values.clamp(max=MAX_EXPONENT).exp()


def alpha_shape(mean_logps: Tensor, alpha: float) -> Tensor:
    """(1 - exp(-a s)) / a of length-averaged log-probs s [B]; s itself as a -> 0.

    Its slope is p^-a: a > 0 stretches unlikely answers, a < 0 flattens them. 0 at s = 0.
    Source: AlphaPO, arXiv:2501.03884.
    """
    return mean_logps if alpha == 0 else (1 - capped_exp(-alpha * mean_logps)) / alpha


def divergence_score(log_ratio: Tensor, divergence: FDivergence, alpha: float) -> Tensor:
    """Score of an answer with x = `log_ratio` [B] = log pi - log pi_ref under an f-divergence.

    reverse_kl: x; forward_kl: 1 - exp(-x); js: ln 2 + logsigmoid(x); alpha: (exp((a - 1) x) - 1) /
    (a - 1), which is x as a -> 1. All are 0 at x = 0 and rise with x. f'(ratio) up to a constant,
    which cancels in a pair. Source: f-DPO, arXiv:2309.16240, table 1.
    """
    if divergence == "forward_kl":
        return 1 - capped_exp(-log_ratio)
    if divergence == "js":
        return math.log(2) + logsigmoid(log_ratio)
    if divergence == "alpha" and alpha != 1:
        return (capped_exp((alpha - 1) * log_ratio) - 1) / (alpha - 1)
    return log_ratio


def desensitised_weights(mask: Tensor, other_mask: Tensor, ld_alpha: float) -> Tensor:
    """Weight [B, T] of each token: `ld_alpha` past the shorter answer's length, else 1.

    `mask` and `other_mask` [B, T] are of the pair's two answers; lengths count their tokens.
    Source: LD-DPO, arXiv:2409.06411.
    """
    shared = torch.minimum(mask.sum(dim=1), other_mask.sum(dim=1))
    position = mask.cumsum(dim=1)
    within = position <= shared[:, None]
    return torch.where(within, 1.0, ld_alpha).to(torch.float64)


def policy_weight(logprobs: Tensor, log_sum_sq: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens [B], float64, of log pi(y_t) - log sum_v pi(v)^2, detached.

    The exponential of the sum over both answers of a pair is its WPO weight: near 1 for answers the
    policy itself would give. Source: WPO, arXiv:2406.11827, eq. 2.
    """
    return row_means((logprobs - log_sum_sq).detach(), mask)


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """log(odds(chosen) / odds(rejected)) [B] of mean log-probs a, b [B]; odds = p / (1 - p).

    (a - b) - (log(1 - e^a) - log(1 - e^b)). Source: ORPO, arXiv:2403.07691, eq. 4 and 7.
    """

    def log_odds(mean_logp: Tensor) -> Tensor:
        bounded = mean_logp.clamp(max=_LARGEST_MEAN_LOGP)
        return bounded - torch.log(-torch.expm1(bounded))  # 1 - e^a without cancellation

    return log_odds(chosen) - log_odds(rejected)


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) logsigmoid(x) - e logsigmoid(-x) [B]: logistic loss, a share e of labels wrong."""
    right = -logsigmoid(logits)
    if label_smoothing == 0:
        return right
    return (1 - label_smoothing) * right - label_smoothing * logsigmoid(-logits)


def matched_by_rank(values: Tensor, others: Tensor) -> Tensor:
    """For each of `values` [B] the one of `others` [B] of the same rank; ties keep their order."""
    order = torch.argsort(values, stable=True)
    matched = torch.empty_like(others)
    matched[order] = others.sort(stable=True).values
    return matched


def masked_sums(logprobs: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of each row's log-probs [B, T] over its mask, times `weights` [B, T]; float64 [B]."""
    if weights is None:
        return row_sums(logprobs, mask)
    return row_sums(masked(logprobs, mask).double() * weights, mask)
