"""The low-variance unbiased estimate of KL(policy || reference), GRPO's choice for the loss."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import KlEstimator, PluginConfig
from posttrain.core.math import kl


class K3Config(PluginConfig):
    """Settings of `k3` and of what is built on it."""

    input_clamp: float | None = Field(
        default=20.0,
        gt=0,
        le=80,
        description="bound of |d|, nats; no gradient beyond; null = off (TRL)",
    )
    output_clamp: float | None = Field(
        default=None,
        gt=0,
        description="bound of the value, nats (verl: 10); no pull back beyond; null = off",
    )


class K3(KlEstimator[K3Config]):
    """k3 = exp(-d) - 1 + d with d = logprobs - ref_logprobs, [B, T].

    Unbiased as a value, never negative, low variance near the reference. As a loss its mean
    gradient is that of KL(reference || policy), which agrees with the wanted one to first order.
    Source: DeepSeekMath, arXiv:2402.03300, eq. 4; Schulman 2020, "Approximating KL divergence".
    """

    name = "k3"
    Config = K3Config

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """KL [B, T], nats."""
        return kl.k3(logprobs - ref_logprobs, self.config.input_clamp, self.config.output_clamp)
