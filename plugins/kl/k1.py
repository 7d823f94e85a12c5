"""The log-ratio estimate of KL(policy || reference)."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import KlEstimator, NoConfig


class K1(KlEstimator[NoConfig]):
    """k1 = d with d = logprobs - ref_logprobs, [B, T].

    Unbiased, signed, high variance. In the reward its policy gradient is that of the KL; as a loss
    its gradient (1 per token) has mean 0 and is pure noise.
    Source: Schulman 2020, "Approximating KL divergence"; arXiv:2512.21852.
    """

    name = "k1"
    Config = NoConfig

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """KL [B, T], nats."""
        return logprobs - ref_logprobs
