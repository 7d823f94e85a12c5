"""Straight-through estimates: the value of one function, the gradient of another."""

from __future__ import annotations

from torch import Tensor


def straight_through(value: Tensor, surrogate: Tensor) -> Tensor:
    """`value` forward, bit for bit, and the gradient of `surrogate` backward; of one shape.

    Source: Bengio, Leonard, Courville 2013, arXiv:1308.3432, section 2 (the estimator's name).
    """
    # (surrogate - itself) first: it is exactly 0, so the value keeps all its bits.
    return value.detach() + (surrogate - surrogate.detach())
