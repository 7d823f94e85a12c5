"""The ReMax preset: REINFORCE against the reward of the greedy answer."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Remax(Algorithm[NoConfig]):
    """L = -(1 / N_seq) sum_it A_it log pi(y_it), A_it = reward-to-go - R(greedy answer).

    One more generation per prompt, at temperature 0; no critic, no group.
    Source: arXiv:2310.10505, algorithm 1.
    """

    name = "remax"
    Config = NoConfig
    fields = {
        "advantage": "remax",
        "policy_loss": "vanilla_pg",
        "aggregator": "seq-mean-token-sum",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
