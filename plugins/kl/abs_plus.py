"""The value of `abs` with the gradient of `k2`."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import KlEstimator, NoConfig
from posttrain.core.math import kl
from posttrain.core.math.ratios import straight_through


class AbsolutePlus(KlEstimator[NoConfig]):
    """abs+ = |d| forward, gradient d backward, with d = logprobs - ref_logprobs, [B, T].

    On on-policy samples the gradient is that of KL(policy || reference); the value is at least it.
    Formula: sg(|d|) + k2 - sg(k2), `+` as in verl 0.9.1.
    """

    name = "abs+"
    Config = NoConfig
    stops_gradients = True

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """|d| [B, T], nats."""
        gap = logprobs - ref_logprobs
        return straight_through(gap.abs(), kl.k2(gap))
