"""The IPO preset: a squared loss on the gap of log-ratios of pairs."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Ipo(Algorithm[NoConfig]):
    """L = mean of (u / n_c - v / n_j - 1 / (2 tau))^2, tau = 0.1, n the numbers of tokens.

    The gap has a target, so pairs that are already separated stop pulling.
    Source: arXiv:2310.12036, eq. 17.
    """

    name = "ipo"
    Config = NoConfig
    stage = "preference"
    fields = {
        "preference_loss": {"name": "ipo", "tau": 0.1, "norm": "mean"},
        "f_divergence": "reverse_kl",
    }
