"""Masked tensors: always by selection, never by multiplication, so NaN under the mask stays there.

Axes: B sequences, T tokens. Masks are 0/1 of any dtype.
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
