"""The A2C preset: one-step advantages of a critic, an entropy bonus."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class A2c(Algorithm[NoConfig]):
    """L = -(1 / N_tok) sum_it [A_it log pi(y_it) + 0.01 H_it], A_it = r_it + V_{i,t+1} - V_it.

    The critic has an optimizer of its own, so the paper's value coefficient 0.5 has no place here.
    Source: A3C, arXiv:1602.01783, algorithm S3 (its synchronous form is A2C).
    """

    name = "a2c"
    Config = NoConfig
    fields = {
        "advantage": {"name": "a2c", "gamma": 1.0},
        "policy_loss": "vanilla_pg",
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "entropy_coef": 0.01,
        "critic": {"clip": None},
    }
