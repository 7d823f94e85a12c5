"""AdamW with float32 or 8-bit moments, and master weights or stochastic rounding.

The class is in core, since what trains without a config uses it too.
"""

from __future__ import annotations

from posttrain.core.training.adamw import AdamW


class RegisteredAdamW(AdamW):
    """w <- w - lr (m / (sqrt(v) + eps) + weight_decay w), with m and v the bias-corrected moving
    averages of the gradient and its square.

    Source: arXiv:1711.05101. Moments of 8 bits: arXiv:2110.02861; stochastic rounding of bfloat16
    weights: arXiv:2010.06192.
    """
