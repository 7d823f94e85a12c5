"""The value of `k3` with the gradient of `k2`: low variance, and right as a loss."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import KlEstimator
from posttrain.core.math import kl
from posttrain.core.math.ratios import straight_through
from posttrain.plugins.kl.k3 import K3Config


class K3Plus(KlEstimator[K3Config]):
    """k3+ = exp(-d) - 1 + d forward, gradient d backward, d = logprobs - ref_logprobs, [B, T].

    Unbiased both as a value and, on on-policy samples, as a gradient of KL(policy || reference).
    The clamps bound the value alone: the gradient is that of the unclamped d.
    Formula: sg(k3) + k2 - sg(k2), `+` as in verl 0.9.1; the bias it removes: arXiv:2506.09477.
    """

    name = "k3+"
    Config = K3Config
    stops_gradients = True

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """KL [B, T], nats."""
        gap = logprobs - ref_logprobs
        value = kl.k3(gap.detach(), self.config.input_clamp, self.config.output_clamp)
        return straight_through(value, kl.k2(gap))
