"""How far the engine's log-probs are from the trainer's for the same sampled tokens.

d = trainer - engine, in nats, over the tokens of a mask whose engine log-prob is known (not NaN).
The samples come from the engine, so exp(d) is an importance weight and k1, k3 estimate
KL(engine || trainer). Everything is summed in float64. Axes: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.math.masking import masked, row_means, row_sums

LOG_BOUND = 20.0
"""Log-ratios are cut to +-20 nats before exp: a weight stays between 2e-9 and 5e8."""


def known_tokens(engine: Tensor, mask: Tensor) -> Tensor:
    """Which tokens [B, T] take part: those in `mask` whose engine log-prob is not NaN."""
    return mask.bool() & ~engine.isnan()


def log_ratio(trainer: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
    """d [B, T] = trainer - engine, detached; 0 under the mask and where the engine gave none."""
    known = known_tokens(engine, mask)
    return (masked(trainer, known) - masked(engine, known)).detach()


def bounded_exp(log_values: Tensor) -> Tensor:
    """exp of values cut to +-20 nats."""
    return log_values.clamp(-LOG_BOUND, LOG_BOUND).exp()


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) of non-negative `weights` [N]: 1 when equal, 1/N when one has all.

    NaN when there is none, or all are 0. Weights (1, 1, 1, 5) have 0.571429. Source: Kish 1965.
    """
    values = weights.double()
    if values.numel() == 0 or not values.any():
        return float("nan")
    # Divided by the largest first: its square could overflow.
    values = values / values.max()
    return float(values.sum().square() / (values.numel() * values.square().sum()))


def mismatch_metrics(
    trainer: Tensor, engine: Tensor, mask: Tensor, *, count_empty_seqs: bool = False
) -> dict[str, float]:
    """Divergence estimates from log-probs [B, T]; empty when the engine gave none.

    - `mismatch/k1` = mean(-d) and `mismatch/k3` = mean(e^d - 1 - d), per token;
    - `mismatch/abs_mean`, `/abs_max` of |d|, `/prob_abs_max` of |e^trainer - e^engine|;
    - `mismatch/ppl_ratio`, mean over rows of e^(-mean d): trainer's perplexity over the engine's;
    - `mismatch/chi2_token` = mean(e^2d) - 1 and `mismatch/chi2_seq`, the same of the rows' sums;
    - `ess/token`, `ess/seq`: effective sample size of the weights e^d and e^(row sum of d).

    `count_empty_seqs`: rows without a token enter the row means with d = 0, as in verl.
    """
    known = known_tokens(engine, mask)
    if not known.any():
        return {}
    gaps, rows = log_ratio(trainer, engine, mask), _rows(known, count_empty_seqs)
    d = gaps[known].double()
    weights, row_weights = bounded_exp(d), bounded_exp(row_sums(gaps, known)[rows])
    probabilities = (trainer[known].double().exp() - engine[known].double().exp()).abs()
    return {
        "mismatch/k1": float(-d.mean()),
        "mismatch/k3": float((weights - 1 - d).mean()),
        "mismatch/abs_max": float(d.abs().max()),
        "mismatch/abs_mean": float(d.abs().mean()),
        "mismatch/prob_abs_max": float(probabilities.max()),
        "mismatch/ppl_ratio": float(bounded_exp(-row_means(gaps, known)[rows]).mean()),
        "mismatch/chi2_token": float(weights.square().mean() - 1),
        "mismatch/chi2_seq": float(row_weights.square().mean() - 1),
        "ess/token": effective_sample_size(weights),
        "ess/seq": effective_sample_size(row_weights),
    }


def perplexity_metrics(
    trainer: Tensor, engine: Tensor, mask: Tensor, *, count_empty_seqs: bool = False
) -> dict[str, float]:
    """Perplexities e^(-row mean of log-probs [B, T]) of both, and their logs' differences per row.

    Means over rows, with `mismatch/log_ppl_diff` = log of the trainer's over the engine's;
    `count_empty_seqs` as in `mismatch_metrics`.
    """
    known = known_tokens(engine, mask)
    if not known.any():
        return {}
    rows = _rows(known, count_empty_seqs)
    log_trainer = -row_means(trainer.detach(), known)[rows]
    log_engine = -row_means(engine.detach(), known)[rows]
    gap = log_trainer - log_engine
    return {
        "mismatch/trainer_ppl": float(log_trainer.exp().mean()),
        "mismatch/trainer_log_ppl": float(log_trainer.mean()),
        "mismatch/engine_ppl": float(log_engine.exp().mean()),
        "mismatch/engine_log_ppl": float(log_engine.mean()),
        "mismatch/log_ppl_diff": float(gap.mean()),
        "mismatch/log_ppl_abs_diff": float(gap.abs().mean()),
        "mismatch/log_ppl_diff_max": float(gap.max()),
        "mismatch/log_ppl_diff_min": float(gap.min()),
    }


def _rows(known: Tensor, count_empty_seqs: bool) -> Tensor:
    return torch.ones_like(known[:, 0]) if count_empty_seqs else known.any(dim=1)
