"""Feedback rules for the coefficient of a KL penalty. Plain numbers, KL in nats."""

from __future__ import annotations


def proportional_factor(
    measured: float, target: float, num_rows: int, horizon: float, clip: float
) -> float:
    """1 + e n / horizon with e = clip(KL / target - 1, -clip, clip).

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """
    error = min(max(measured / target - 1.0, -clip), clip)
    return 1.0 + error * num_rows / horizon


def halving_factor(measured: float, target: float, factor: float, band: float) -> float:
    """1 / factor below target / band, factor above target * band, else 1.

    Source: PPO, arXiv:1707.06347, section 4, with factor 2 and band 1.5.
    """
    if measured < target / band:
        return 1.0 / factor
    return factor if measured > target * band else 1.0
