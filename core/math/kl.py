"""KL to the reference policy: estimators in nats, and feedback rules for the coefficient.

Samples come from the policy. Source: Schulman 2020, "Approximating KL divergence". Any shape.
"""

from __future__ import annotations

from torch import Tensor


def k2(gap: Tensor) -> Tensor:
    """d^2 / 2, with gradient d: on on-policy samples its mean is the gradient of the KL."""
    return 0.5 * gap.square()


def k3(gap: Tensor, input_clamp: float | None, output_clamp: float | None) -> Tensor:
    """exp(-d) - 1 + d, with gradient 1 - exp(-d); exactly 0 beyond either clamp.

    `input_clamp` bounds |d|, `output_clamp` the value (nats); None means no bound. Beyond the
    bound of
    the value, which d < -2.6 reaches with 10, nothing pulls the policy back to the reference.
    """
    if input_clamp is not None:
        gap = gap.clamp(-input_clamp, input_clamp)
    # expm1: near the reference exp(-d) - 1 would lose all digits of a float32.
    value = (-gap).expm1() + gap
    return value if output_clamp is None else value.clamp(-output_clamp, output_clamp)


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
