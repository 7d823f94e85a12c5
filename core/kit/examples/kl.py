"""A KL estimator: half the squared log-ratio."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import KlEstimator, NoConfig


class Example(KlEstimator[NoConfig]):
    """k2 = d^2 / 2 with d = logprobs - ref_logprobs, [B, T], nats.

    Source: Schulman 2020, "Approximating KL divergence".
    """

    name = "example"
    Config = NoConfig

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """KL [B, T]; the gradient flows through `logprobs`."""
        return (logprobs - ref_logprobs).square() / 2
