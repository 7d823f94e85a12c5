"""The Clip-Cov preset: keeps entropy by dropping a few high-covariance tokens."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class ClipCov(Algorithm[NoConfig]):
    """GRPO's loss, less the loss of 0.02 % of tokens drawn among those with 1 < cov(A, log pi) < 5.

    Source: arXiv:2505.22617, eq. 10 to 12.
    """

    name = "clip_cov"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": "clip_cov",
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
