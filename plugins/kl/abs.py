"""The absolute log-ratio: a distance to the reference, not an estimate of the KL."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import KlEstimator, NoConfig


class AbsoluteKl(KlEstimator[NoConfig]):
    """abs = |d| with d = logprobs - ref_logprobs, [B, T].

    Its mean is at least KL(policy || reference). As a loss every token pulls with strength 1,
    however near the reference it is, and not at all at d = 0.
    Source: verl 0.9.1, `kl_penalty`.
    """

    name = "abs"
    Config = NoConfig

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """|d| [B, T], nats."""
        return (logprobs - ref_logprobs).abs()
