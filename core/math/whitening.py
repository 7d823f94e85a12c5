"""Whitening: shift to mean 0 and scale to variance 1, over tokens or over responses.

The two are different formulas on purpose (algorithms differ in where eps goes): tokens use
rsqrt(var + eps), responses divide by (std + eps). Axes: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.math.masking import masked, row_sums


def whiten_tokens(values: Tensor, mask: Tensor, *, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """(A - mean) * rsqrt(var + eps) over the masked tokens of `values` [B, T], float64; 0 outside.

    Fewer than two tokens are centred only. The variance is the mean squared deviation from the
    mean: sum of squares less squared mean would cancel.
    """
    kept = values[mask.bool()].double()
    if kept.numel() == 0:
        return torch.zeros_like(values, dtype=torch.float64)
    deviation = values.double() - kept.mean()
    if kept.numel() > max(1, ddof):
        variance = (kept - kept.mean()).square().sum() / (kept.numel() - ddof)
        deviation = deviation * torch.rsqrt(variance + eps)
    return masked(deviation, mask)


def whiten_rows(values: Tensor, scored: Tensor, *, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """(A - mean) / (std + eps) over the scored rows of `values` [B], float64; 0 for the others."""
    kept = values[scored.bool()].double()
    if kept.numel() == 0:
        return torch.zeros_like(values, dtype=torch.float64)
    deviation = values.double() - kept.mean()
    if kept.numel() > max(1, ddof):
        deviation = deviation / (kept.std(correction=ddof) + eps)
    return masked(deviation, scored)


def whiten_row_means(values: Tensor, mask: Tensor, *, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """(A - mean) / (std + eps) of `values` [B, T], float64; 0 where `mask` is 0.

    Mean and deviation are those of the rows' own means, so every response weighs the same; rows
    without a token are not counted. Where a row is constant this is `whiten_rows`.
    """
    lengths = mask.double().sum(dim=1)
    filled = lengths > 0
    if not filled.any():
        return torch.zeros_like(values, dtype=torch.float64)
    kept = row_sums(values, mask)[filled] / lengths[filled]
    deviation = values.double() - kept.mean()
    if kept.numel() > max(1, ddof):
        deviation = deviation / (kept.std(correction=ddof) + eps)
    return masked(deviation, mask)
