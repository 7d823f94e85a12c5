"""The KL-Cov preset: keeps entropy by a KL penalty on the highest covariances."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class KlCov(Algorithm[NoConfig]):
    """L = -A r, plus |log r| on the 0.2 % of tokens with the highest cov(A, log pi). No clip.

    Source: arXiv:2505.22617, eq. 10, 13 and 14.
    """

    name = "kl_cov"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": "kl_cov",
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
