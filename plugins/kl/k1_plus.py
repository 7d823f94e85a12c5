"""The value of `k1` with the gradient of `k2`."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import KlEstimator, NoConfig
from posttrain.core.math import kl
from posttrain.core.math.ratios import straight_through


class K1Plus(KlEstimator[NoConfig]):
    """k1+ = d forward, gradient d backward, with d = logprobs - ref_logprobs, [B, T].

    Unbiased both as a value and, on on-policy samples, as a gradient of KL(policy || reference).
    The value is signed. Formula: sg(k1) + k2 - sg(k2), `+` as in verl 0.9.1.
    """

    name = "k1+"
    Config = NoConfig
    stops_gradients = True

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """KL [B, T], nats."""
        gap = logprobs - ref_logprobs
        return straight_through(gap, kl.k2(gap))
