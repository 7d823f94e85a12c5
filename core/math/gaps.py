"""Gaps in a response mask: packing the masked tokens of each row together, and back.

Axes: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.math.masking import masked


def close_gaps(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [B, T] with the masked tokens of each row moved to its front, in order; 0 after."""
    return masked(values, mask).gather(1, _packing(mask))


def reopen_gaps(packed: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `close_gaps`: each packed token back at its place, 0 where the mask is 0."""
    return masked(torch.zeros_like(packed).scatter(1, _packing(mask), packed), mask)


def _packing(mask: Tensor) -> Tensor:
    """Column indices [B, T] of each row: the masked tokens first, both parts in order."""
    return torch.argsort((~mask.bool()).to(torch.int8), dim=1, stable=True)
