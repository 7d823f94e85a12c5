"""Masked tensors: reductions, packing of masked tokens, and whitening.

Axes: B sequences, T tokens. Masks are 0/1 of any dtype.

Axes: B sequences, T tokens.

The two are different formulas on purpose (algorithms differ in where eps goes): tokens use
rsqrt(var + eps), responses divide by (std + eps). Axes: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is 1, else exactly 0; values and gradients under the mask are ignored.

    Mask the *inputs* of exp, log and powers with it: masking the result alone still sends NaN back
    through the branch that was not chosen, because 0 * NaN is NaN.
    """
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of each row [B] of `values` [B, T] over its mask, in float64; an empty row sums to 0."""
    return masked(values, mask).sum(dim=1, dtype=torch.float64)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row [B] of `values` [B, T] over its mask, in float64; an empty row gives 0."""
    return row_sums(values, mask) / mask.double().sum(dim=1).clamp(min=1)


def mask_weights(mask: Tensor) -> Tensor:
    """`mask` as numbers to compute with: its own dtype if floating, else float64."""
    return mask if mask.is_floating_point() else mask.to(torch.float64)


def close_gaps(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [B, T] with the masked tokens of each row moved to its front, in order; 0 after."""
    return masked(values, mask).gather(1, _packing(mask))


def reopen_gaps(packed: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `close_gaps`: each packed token back at its place, 0 where the mask is 0."""
    return masked(torch.zeros_like(packed).scatter(1, _packing(mask), packed), mask)


def _packing(mask: Tensor) -> Tensor:
    """Column indices [B, T] of each row: the masked tokens first, both parts in order."""
    return torch.argsort((~mask.bool()).to(torch.int8), dim=1, stable=True)


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


def whiten_row_means(
    values: Tensor,
    mask: Tensor,
    firsts: Tensor | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """(A - mean) / (std + eps) of `values` [B, T], float64; 0 where `mask` is 0.

    Mean and deviation are those of the rows' own means, so every response weighs the same; rows
    without a token are not counted. Where a row is constant this is `whiten_rows`. Rows with one
    number in `firsts` [B] are branches of one episode, which has one mean.
    """
    lengths, sums = mask.double().sum(dim=1), row_sums(values, mask)
    if firsts is not None:
        lengths = torch.zeros_like(lengths).index_add(0, firsts, lengths)
        sums = torch.zeros_like(sums).index_add(0, firsts, sums)
    filled = lengths > 0
    if not filled.any():
        return torch.zeros_like(values, dtype=torch.float64)
    kept = sums[filled] / lengths[filled]
    deviation = values.double() - kept.mean()
    if kept.numel() > max(1, ddof):
        deviation = deviation / (kept.std(correction=ddof) + eps)
    return masked(deviation, mask)
