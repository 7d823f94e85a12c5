"""`k3` times an importance ratio: the exact gradient of the KL, also off policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import KlEstimator
from posttrain.core.math import kl
from posttrain.plugins.kl.k3 import K3Config


class K3IsConfig(K3Config):
    """Settings of `k3_is`."""

    is_ratio: Literal["old", "rollout", "policy"] = Field(
        default="old",
        description="ratio of the policy to: the policy before the first update (old), the "
        "engine's log-probs (rollout), or whatever ratio the policy loss has, unclipped (TRL)",
    )


class K3Is(KlEstimator[K3IsConfig]):
    """k3_is = r (exp(-d) - 1 + d), r = exp(logprobs - sg(behaviour)), [B, T], d as in `k3`.

    The gradient flows through both factors. Under the behaviour policy its mean is
    KL(policy || reference) and its mean gradient that KL's. Without a ratio the samples are taken
    to be on policy: r = 1, with gradient 1.
    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1; arXiv:2506.09477.
    """

    name = "k3_is"
    Config = K3IsConfig

    def ratio_source(self) -> Literal["old", "rollout", "policy"]:
        """As `is_ratio` says."""
        return self.config.is_ratio

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """KL [B, T], nats."""
        if ratio is None:
            ratio = (logprobs - logprobs.detach()).exp()
        gap = logprobs - ref_logprobs
        return ratio * kl.k3(gap, self.config.input_clamp, self.config.output_clamp)
