"""Tokens whose log-prob and advantage vary together, and how such tokens are picked.

Axes: B sequences, T tokens, N candidates. A pick depends on the mini-batch's tokens and on the
generator alone, not on the order of its rows: candidates are in the order of (row id, position).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.core.math.masking import masked


def token_covariances(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A)(lp - mean lp) [B, T], float64, means over all masked tokens; 0 elsewhere.

    Their mean over the mask is the covariance. Source: arXiv:2505.22617, eq. 10.
    """
    kept = mask.bool()
    if not kept.any():
        return torch.zeros_like(mask, dtype=torch.float64)
    centred = [
        x.detach().double() - x.detach()[kept].double().mean() for x in (advantages, logprobs)
    ]
    return masked(centred[0] * centred[1], mask)


def num_picked(share: float, mask: Tensor, at_least: int) -> int:
    """How many tokens a share of the masked ones is: rounded down, and `at_least` so many."""
    return max(at_least, math.floor(share * float(mask.double().sum())))


def ordered_positions(candidates: Tensor, row_ids: Tensor) -> Tensor:
    """(row, column) [N, 2] of the `candidates` [B, T], ordered by (row id, column)."""
    positions = candidates.bool().nonzero()
    return positions[torch.argsort(row_ids[positions[:, 0]], stable=True)]


def marked(positions: Tensor, shape: torch.Size) -> Tensor:
    """1 at the `positions` [N, 2] of a tensor of `shape`, else 0; boolean."""
    result = torch.zeros(shape, dtype=torch.bool, device=positions.device)
    result[positions[:, 0], positions[:, 1]] = True
    return result


def highest(values: Tensor, mask: Tensor, count: int, row_ids: Tensor) -> Tensor:
    """Marks the `count` masked tokens of highest `values` [B, T]; ties by (row id, column)."""
    positions = ordered_positions(mask, row_ids)
    order = torch.argsort(values[positions[:, 0], positions[:, 1]], descending=True, stable=True)
    return marked(positions[order[:count]], mask.shape)
