"""The BAPO preset: clip bounds chosen at every step to balance positive and negative."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Bapo(Algorithm[NoConfig]):
    """GRPO's clipped loss, its bounds moved until positive tokens give 40 % of the pull.

    c_low in [0.6, 0.9], c_high in [1.2, 3.0]; the upper bound moves first. No KL.
    Source: arXiv:2510.18927, algorithm 1 and section 5.1.
    """

    name = "bapo"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": {"name": "bapo", "rho0": 0.4},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
