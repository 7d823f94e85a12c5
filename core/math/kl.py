"""Estimates of KL(policy || reference) from the log-ratio d = log policy - log reference, in nats.

Samples come from the policy. Source: Schulman 2020, "Approximating KL divergence". Any shape.
"""

from __future__ import annotations

from torch import Tensor


def k2(gap: Tensor) -> Tensor:
    """d^2 / 2, with gradient d: on on-policy samples its mean is the gradient of the KL."""
    return 0.5 * gap.square()


def k3(gap: Tensor, input_clamp: float | None, output_clamp: float | None) -> Tensor:
    """exp(-d) - 1 + d, with gradient 1 - exp(-d); exactly 0 beyond either clamp.

    `input_clamp` bounds |d|, `output_clamp` the value (nats); None is no bound. Beyond the bound of
    the value, which d < -2.6 reaches with 10, nothing pulls the policy back to the reference.
    """
    if input_clamp is not None:
        gap = gap.clamp(-input_clamp, input_clamp)
    # expm1: near the reference exp(-d) - 1 would lose all digits of a float32.
    value = (-gap).expm1() + gap
    return value if output_clamp is None else value.clamp(-output_clamp, output_clamp)
