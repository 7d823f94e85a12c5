"""Half the squared log-ratio: small bias, and the right gradient as a loss."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import KlEstimator, NoConfig
from posttrain.core.math import kl


class K2(KlEstimator[NoConfig]):
    """k2 = d^2 / 2 with d = logprobs - ref_logprobs, [B, T].

    Never negative, low variance, biased as a value by O(d^3). As a loss its mean gradient on
    on-policy samples is exactly that of KL(policy || reference).
    Source: Schulman 2020, "Approximating KL divergence"; arXiv:2506.09477.
    """

    name = "k2"
    Config = NoConfig

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """KL [B, T], nats."""
        return kl.k2(logprobs - ref_logprobs)
